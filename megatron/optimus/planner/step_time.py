"""Predicted time of one optimizer step: operations and bytes over the machine's rates, plus what is not hidden.

    micro-batch = products / rate + attention / rate + experts / rate + bytes / rate + layers x launch time
                  + communication inside layers (hidden parts at the cost of overlap)
    step        = micro-batches on the slowest stage + the pipeline's bubble + gradients and weights on the wire
                  + optimizer + a constant
    and no less than the host needs for its passes through layers: it runs ahead of the device, but not for ever

Left out: uneven routing, other jobs on the network, noise between ranks, input, logging and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.planner.communication import Collective, Hiding, Kind, collectives
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.pipeline import bubble_seconds
from megatron.optimus.planner.share import Share, groups_alike
from megatron.optimus.planner.work import (
    Work,
    head_work,
    last_product_work,
    layer_work,
    micro_batch_work,
    router_work,
    shared_work,
    update_work,
)
from megatron.optimus.training.timing import flops_per_token

SHORT, LONG = 4096, 131072  # tokens of a sequence to which the rates of attention belong
PER_STEP = ("dense", "edp")  # axes along which a rank communicates once a step, not in every micro-batch


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, of the slowest rank; ``compute``, ``exposed``, ``bubble``, ``update`` and ``launching`` are
    the whole."""

    compute: float  # of all micro-batches, slowed down by communication beside it
    exposed: float  # communication with nothing beside it
    bubble: float  # waiting for other stages
    update: float  # optimizer, and the constant part
    launching: float  # the device waiting for its host
    communication: float  # all of it, hidden or not
    data: float  # of it, gradients and weights between replicas
    tokens: int  # of the global batch
    devices: int
    flops_per_token: float
    peak: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.bubble + self.update + self.launching

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


def attention_rate(share: Share, machine: Machine) -> float:
    """FLOP/s of attention, causal counted at half: the time of an operation is linear in 1 / length between the two
    lengths for which there are figures."""
    short, long = 1 / machine.attention.value, 1 / machine.attention_long.value
    length = min(max(share.config.training.seq_length, SHORT), LONG)
    rate = 1 / (long + (short - long) * (1 / length - 1 / LONG) / (1 / SHORT - 1 / LONG))
    return rate * (machine.attention_deterministic.value if share.config.training.deterministic else 1.0)


def compute_seconds(work: Work, share: Share, machine: Machine) -> float:
    return (
        work.products / machine.products.value
        + work.attention / attention_rate(share, machine)
        + work.experts / machine.experts.value
        + work.traffic / machine.traffic.value
        + work.layers * machine.layer_time.value
        + work.host / machine.host.value
        + work.wide / machine.wide.value
    )


def _windows(share: Share, machine: Machine) -> dict[Hiding, float]:
    """Seconds in a step that communication inside of layers can hide behind; what has no entry hides whole."""
    layers = share.num_moe_layers * share.micro_batches
    is_split = share.num_moe_layers and machine.kernels.splits_backward
    last = compute_seconds(last_product_work(share), share, machine) if is_split else 0.0
    router = compute_seconds(router_work(share), share, machine) if share.num_moe_layers else 0.0
    shared = compute_seconds(shared_work(share, machine.kernels), share, machine)  # a third of it in the forward
    return {
        Hiding.NOTHING: 0.0,
        Hiding.LAST_PRODUCT: layers * (last + shared * 2 / 3),
        Hiding.ROUTER: layers * (router + shared / 3),
        Hiding.SHARED: layers * shared / 3,
    }


def busy(share: Share, machine: Machine) -> tuple[float, float, float]:
    """(computing, exposed communication, communication) of all micro-batches of a stage, without its bubble."""
    compute = compute_seconds(micro_batch_work(share, machine.kernels), share, machine) * share.micro_batches
    exposed = total = 0.0
    free = _windows(share, machine)
    for one in collectives(share, machine.kernels):
        if one.axis in PER_STEP:
            continue
        needed = seconds(one, share, machine)
        hidden = min(needed, free.get(one.hiding, needed))
        if one.hiding in free:
            free[one.hiding] -= hidden
        total += needed
        exposed += needed - hidden
        compute += hidden * machine.overlap_cost.value
    return compute, exposed, total


def _of_data(share: Share, machine: Machine, window: float) -> tuple[float, float, float]:
    """(slowdown of what runs beside, exposed, all) of gradients and weights, which can hide behind ``window``."""
    slowed = exposed = total = 0.0
    forward, backward = window / 3, window * 2 / 3 / share.micro_batches  # the last micro-batch's backward
    free = {Hiding.BACKWARD: backward, Hiding.FORWARD: forward / share.micro_batches, Hiding.NOTHING: 0.0}
    for one in collectives(share, machine.kernels):
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


def stage_seconds(share: Share, whole: float, machine: Machine) -> list[float]:
    """``whole``, a rank's seconds for one micro-batch, shared out over its chunks by what is computed there."""
    head = compute_seconds(head_work(share, machine.kernels), share, machine) if share.has_head else 0.0
    kinds = {kind for chunk in share.kinds for kind in chunk}
    works = {kind: layer_work(share, frozenset(), machine.kernels, is_moe=kind) for kind in kinds}
    each = {kind: compute_seconds(work, share, machine) for kind, work in works.items()}
    own = [sum(each[is_moe] for is_moe in chunk) for chunk in share.kinds]
    last = share.num_stages - 1
    return [
        (whole - head) * layers / sum(own) + head * (stage == last)
        for stage, layers in zip(share.stages, own, strict=True)
    ]


def _bubble(share: Share, times: list[float]) -> float:
    """Seconds in which the slowest rank waits; ``times`` of every stage for one micro-batch."""
    pp, schedule = share.layout.pp, share.config.parallel.pipeline_schedule
    if pp == 1:
        return 0.0
    if schedule not in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV):
        return bubble_seconds(times, pp, share.micro_batches)
    # The others work on the first and the last micro-batch; weight gradients, a third of it, fill two thirds.
    others = sum(times) - sum(times[stage] for stage in share.stages)
    return others / share.config.parallel.virtual_pipeline_model_parallel_size / 3


def step_time(shares: list[Share], machine: Machine) -> StepTime:
    """Of a run whose pipeline ranks have these shares, each of them once and in order."""
    groups = groups_alike(shares)
    stages = [busy(group[0], machine) for group in groups]
    slowest = max(range(len(groups)), key=lambda kind: stages[kind][0] + stages[kind][1])
    times = [0.0] * shares[0].num_stages
    for (compute, exposed, _), group in zip(stages, groups, strict=True):
        chunks = stage_seconds(group[0], (compute + exposed) / group[0].micro_batches, machine)
        for stage, seconds_each in ((s, t) for one in group for s, t in zip(one.stages, chunks, strict=True)):
            times[stage] = seconds_each
    share, (compute, exposed, communication) = groups[slowest][0], stages[slowest]
    slowed, bare, data = _of_data(share, machine, compute + exposed)
    training, bubble = share.config.training, _bubble(share, times)
    update = compute_seconds(update_work(share), share, machine) + machine.step_time.value
    passes = max(micro_batch_work(group[0], machine.kernels).layers for group in groups) * share.micro_batches
    without = compute + slowed + exposed + bare + bubble + update
    return StepTime(
        compute=compute + slowed,
        exposed=exposed + bare,
        bubble=bubble,
        update=update,
        launching=max(0.0, passes * machine.host_time.value - without),
        communication=communication + data,
        data=data,
        tokens=training.global_batch_size * training.seq_length,
        devices=share.layout.world_size,
        flops_per_token=flops_per_token(share.model, training.seq_length),
        peak=machine.peak.value,
    )
