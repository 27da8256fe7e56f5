"""Predicted time of one optimizer step: operations and bytes over the machine's rates, plus what is not hidden.

    micro-batch = products / rate + attention / rate + experts / rate + bytes / rate + layers x launch time
                  + communication inside layers (hidden parts at the cost of overlap)
    step        = micro-batches on the slowest stage + the pipeline's bubble + gradients and weights on the wire
                  + optimizer + a constant

Left out: uneven routing, other jobs on the network, noise between ranks, input, logging and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.observe.flops import flops_per_token
from megatron.optimus.planner.communication import Collective, Hiding, Kind, collectives
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.share import Share
from megatron.optimus.planner.work import Work, micro_batch_work, update_work

PER_STEP = ("dense", "edp")  # axes along which a rank communicates once a step, not in every micro-batch


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of the slowest rank. ``compute`` + ``exposed`` + ``bubble`` + ``update`` is the whole."""

    compute: float  # of all micro-batches, slowed down by communication beside it
    exposed: float  # communication with nothing beside it
    bubble: float  # waiting for other stages
    update: float  # optimizer, and the constant part
    communication: float  # all of it, hidden or not
    data: float  # of it, gradients and weights between replicas
    tokens: int  # of the global batch
    devices: int
    flops_per_token: float
    peak: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.bubble + self.update

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def mfu(self) -> float:
        """Of the peak, recomputation not counted as useful."""
        return self.tokens_per_second_per_device * self.flops_per_token / self.peak

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total


def bandwidth(axis: str, size: int, share: Share, machine: Machine) -> float:
    """Bytes/s with which a rank sends along an axis while all groups of the axis communicate."""
    layout, node = share.layout, machine.devices_per_node
    stage = layout.dp * layout.cp * layout.tp
    stride = {"pp": stage, "dp": layout.cp * layout.tp, "cp": layout.tp, "dense": layout.tp, "edp": share.expert_ranks}
    apart = stride.get(axis, 1)
    if (size - 1) * apart < node:
        return machine.pair.value if size == 2 else machine.inside.value
    beside = max(1, min(size, node // apart))  # ranks of one group in a node: they share its ways out
    own = machine.network.value * beside / node
    return min(own, machine.inside.value) if beside > 1 else own


def seconds(one: Collective, share: Share, machine: Machine) -> float:
    """Of all its repetitions in a step, alone."""
    if one.kind is Kind.ALL_TO_ALL and _leaves_node(one, share, machine):
        rate = machine.network.value / machine.devices_per_node
    else:
        rate = bandwidth(one.axis, one.size, share, machine)
    hops = 1.0 if one.kind is Kind.SEND else math.log2(one.size)
    return one.sent / rate + one.count * hops * machine.latency.value


def _leaves_node(one: Collective, share: Share, machine: Machine) -> bool:
    stride = {"cp": share.layout.tp}.get(one.axis, 1)
    return one.size * stride > machine.devices_per_node


def compute_seconds(work: Work, machine: Machine) -> float:
    return (
        work.products / machine.products.value
        + work.attention / machine.attention.value
        + work.experts / machine.experts.value
        + work.traffic / machine.traffic.value
        + work.layers * machine.layer_time.value
        + work.host / machine.host.value
    )


def _of_stage(share: Share, machine: Machine) -> tuple[float, float, float]:
    """(computing, exposed communication, communication) of all micro-batches of a stage, without its bubble."""
    compute = compute_seconds(micro_batch_work(share, machine.kernels), machine) * share.micro_batches
    exposed = total = 0.0
    for one in collectives(share):
        if one.axis in PER_STEP:
            continue
        needed = seconds(one, share, machine)
        total += needed
        if one.hiding is Hiding.NOTHING:
            exposed += needed
        else:
            compute += needed * machine.overlap_cost.value
    return compute, exposed, total


def _of_data(share: Share, machine: Machine, window: float) -> tuple[float, float, float]:
    """(slowdown of what runs beside, exposed, all) of gradients and weights, which can hide behind ``window``."""
    slowed = exposed = total = 0.0
    forward, backward = window / 3, window * 2 / 3 / share.micro_batches  # the last micro-batch's backward
    free = {Hiding.BACKWARD: backward, Hiding.FORWARD: forward / share.micro_batches, Hiding.NOTHING: 0.0}
    for one in collectives(share):
        if one.axis not in PER_STEP:
            continue
        needed = seconds(one, share, machine)
        if one.hiding is Hiding.BACKWARD and one.count > 1:  # stage 2 reduces after every micro-batch
            free[one.hiding] = max(free[one.hiding], window * 2 / 3)
        hidden = min(needed, free[one.hiding])
        free[one.hiding] -= hidden
        slowed += hidden * machine.overlap_cost.value
        exposed += needed - hidden
        total += needed
    return slowed, exposed, total


def _bubble(share: Share, slowest: float) -> float:
    """Seconds in which the slowest stage waits; ``slowest``: its time for all micro-batches."""
    pp, chunks = share.layout.pp, share.config.parallel.virtual_pipeline_model_parallel_size
    schedule = share.config.parallel.pipeline_schedule
    turns = (pp - 1) / chunks * slowest / share.micro_batches
    splits = schedule in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
    return turns / 3 if splits else turns  # weight gradients, a third of the work, fill two thirds of it


def step_time(shares: list[Share], machine: Machine) -> StepTime:
    """Of a run whose ranks have these shares, one at least for each kind of pipeline rank."""
    stages = [_of_stage(share, machine) for share in shares]
    slowest = max(range(len(shares)), key=lambda rank: stages[rank][0] + stages[rank][1])
    share, (compute, exposed, communication) = shares[slowest], stages[slowest]
    slowed, bare, data = _of_data(share, machine, compute + exposed)
    training = share.config.training
    return StepTime(
        compute=compute + slowed,
        exposed=exposed + bare,
        bubble=_bubble(share, compute + exposed),
        update=compute_seconds(update_work(share), machine) + machine.step_time.value,
        communication=communication + data,
        data=data,
        tokens=training.global_batch_size * training.seq_length,
        devices=share.layout.world_size,
        flops_per_token=flops_per_token(share.model, training.seq_length),
        peak=machine.peak.value,
    )
