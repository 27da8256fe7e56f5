"""Predicts the time of one optimizer step: operations and bytes over the machine's rates, plus what is not hidden.

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

from megatron.optimus.config.costs import (
    FP32,
    Collective,
    CollectiveKind,
    OperationCounts,
    OverlapsWith,
    flops_per_token,
)
from megatron.optimus.config.rank_plan import RankPlan, group_identical_ranks
from megatron.optimus.config.schema import OptimizerName, PipelineSchedule
from megatron.optimus.models.activations import CUDA, Kernels, layer_parts
from megatron.optimus.models.parameters import rank_parameters
from megatron.optimus.models.work import head_work, last_product_work, layer_work, router_work, shared_work
from megatron.optimus.planner.communication import collectives
from megatron.optimus.planner.hardware import Machine
from megatron.optimus.planner.matrix_states import matrix_work
from megatron.optimus.planner.optimizer_state import flat_buffers, num_moments
from megatron.optimus.planner.pipeline import bubble_seconds

SHORT, LONG = 4096, 131072  # tokens of a sequence to which the rates of attention belong
PER_STEP = ("dense", "edp")  # axes along which a rank communicates once a step, not in every micro-batch


@dataclass(frozen=True)
class PredictedStepTime:
    """Seconds of one step of the slowest rank.

    ``compute``, ``exposed``, ``bubble``, ``update`` and ``launching`` add up to the whole.
    """

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
        """Seconds of the whole step."""
        return self.compute + self.exposed + self.bubble + self.update + self.launching

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all devices together."""
        return self.tokens / self.total

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens/s of one device."""
        return self.tokens_per_second / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: recomputation is not counted as useful."""
        return self.tokens_per_second_per_device * self.flops_per_token / self.peak

    @property
    def bubble_share(self) -> float:
        """The bubble's share of the step, 0 to 1."""
        return self.bubble / self.total


# ---- what is done


def gradient_work(rank: RankPlan, kernels: Kernels) -> OperationCounts:
    """Counts the moves of one micro-batch's gradients from where backward leaves them to where they add up."""
    kept = rank.gradient_element_bytes
    again = (rank.micro_batches - 1) / rank.micro_batches  # all but the first read what is there
    traffic = 0.0
    for parameter, count in rank_parameters(rank).items():
        if parameter.is_expert and kernels.adds_gradients and rank.adds_expert_gradients:
            # cleared, read and written, where a gradient apart was written
            per_element = 3.0 * kept - rank.element_bytes
        else:
            per_element = rank.element_bytes + kept * (1 + again)
        traffic += parameter.numel * count * per_element
    return OperationCounts(memory_bytes=traffic)


def update_work(rank: RankPlan) -> OperationCounts:
    """Counts the optimizer's work, once a step: norm and update of this rank's shards."""
    kept, sent = rank.gradient_element_bytes, rank.sent_gradient_element_bytes
    total = OperationCounts()
    for buffer in flat_buffers(rank):
        width = rank.config.optimizer.optimizer_state_dtype.element_bytes
        per_element = 2 * max(kept, sent) + 2 * FP32 + rank.element_bytes + 2 * num_moments(rank, buffer) * width
        total += OperationCounts(memory_bytes=per_element * buffer.shard)
        if buffer.is_matrix and rank.config.optimizer.optimizer in (OptimizerName.MUON, OptimizerName.NORMUON):
            side = min(rank.model.hidden_size, rank.model.moe_ffn_hidden_size or rank.model.ffn_hidden_size)
            steps = rank.config.optimizer.muon_num_ns_steps
            total += OperationCounts(
                gemm_flops=steps * 6.0 * side * buffer.shard, memory_bytes=steps * 12.0 * buffer.shard
            )
    return total + matrix_work(rank)


def micro_batch_work(rank: RankPlan, kernels: Kernels = CUDA) -> OperationCounts:
    """Adds up all that a rank does for one micro-batch."""
    parallel = rank.config.parallel
    chosen = frozenset(parallel.recompute_modules)
    limit = rank.num_layers if parallel.recompute_num_layers is None else parallel.recompute_num_layers
    total = OperationCounts()
    for is_moe in sorted({kind for chunk in rank.moe_flags for kind in chunk}):
        count = sum(chunk.count(is_moe) for chunk in rank.moe_flags)
        recomputing = sum(chunk[:limit].count(is_moe) for chunk in rank.moe_flags)
        total += layer_work(rank, frozenset(), kernels, is_moe=is_moe) * (count - recomputing)
        total += layer_work(rank, chosen, kernels, is_moe=is_moe) * recomputing
        offloaded = sum(chunk[: parallel.cpu_offloading_num_layers].count(is_moe) for chunk in rank.moe_flags)
        if offloaded:
            again = chosen if limit else frozenset()
            parts = layer_parts(rank, kernels, again, is_moe=is_moe, offload=False)
            total += OperationCounts(host=2.0 * sum(part.saved for part in parts) * offloaded)
    if rank.has_head:
        total += head_work(rank, kernels)
    return total + gradient_work(rank, kernels)


# ---- how long it takes


def bandwidth(axis: str, size: int, rank: RankPlan, machine: Machine) -> float:
    """Bytes/s with which a rank sends along an axis while all groups of the axis communicate."""
    layout, node = rank.layout, machine.devices_per_node
    stage = layout.dp * layout.cp * layout.tp
    stride = {"pp": stage, "dp": layout.cp * layout.tp, "cp": layout.tp, "dense": layout.tp, "edp": rank.expert_ranks}
    apart = stride.get(axis, 1)
    if (size - 1) * apart < node:
        return machine.two_rank_bandwidth.value if size == 2 else machine.intra_node_bandwidth.value
    beside = max(1, min(size, node // apart))  # ranks of one group in a node: they share its ways out
    own = machine.node_bandwidth.value * beside / node
    return min(own, machine.intra_node_bandwidth.value) if beside > 1 else own


def seconds(one: Collective, rank: RankPlan, machine: Machine) -> float:
    """Predicts the time of all its repetitions in a step, alone."""
    if one.kind is CollectiveKind.ALL_TO_ALL and _leaves_node(one, rank, machine):
        rate = machine.node_bandwidth.value / machine.devices_per_node
    else:
        rate = bandwidth(one.axis, one.size, rank, machine)
    hops = 1.0 if one.kind is CollectiveKind.SEND else math.log2(one.size)
    return one.sent / rate + one.count * hops * machine.latency.value


def _leaves_node(one: Collective, rank: RankPlan, machine: Machine) -> bool:
    stride = {"cp": rank.layout.tp}.get(one.axis, 1)
    return one.size * stride > machine.devices_per_node


def attention_rate(rank: RankPlan, machine: Machine) -> float:
    """FLOP/s of attention, causal counted at half.

    The time of an operation is linear in 1 / length between the two lengths for which there are figures.
    """
    short, long = 1 / machine.attention.value, 1 / machine.attention_long.value
    length = min(max(rank.config.training.seq_length, SHORT), LONG)
    rate = 1 / (long + (short - long) * (1 / length - 1 / LONG) / (1 / SHORT - 1 / LONG))
    return rate * (machine.attention_deterministic.value if rank.config.training.deterministic else 1.0)


def compute_seconds(work: OperationCounts, rank: RankPlan, machine: Machine) -> float:
    """Predicts the seconds of some work on one device, its parts one after the other."""
    return (
        work.gemm_flops / machine.products.value
        + work.attention / attention_rate(rank, machine)
        + work.experts / machine.experts.value
        + work.memory_bytes / machine.traffic.value
        + work.layers * machine.layer_time.value
        + work.host / machine.host.value
        + work.wide / machine.wide.value
    )


def _windows(rank: RankPlan, machine: Machine) -> dict[OverlapsWith, float]:
    """Seconds in a step that communication inside of layers can hide behind; what has no entry hides whole."""
    layers = rank.num_moe_layers * rank.micro_batches
    is_split = rank.num_moe_layers and machine.kernels.splits_backward
    last = compute_seconds(last_product_work(rank), rank, machine) if is_split else 0.0
    router = compute_seconds(router_work(rank, machine.kernels), rank, machine) if rank.num_moe_layers else 0.0
    shared = compute_seconds(shared_work(rank, machine.kernels), rank, machine)  # a third of it in the forward
    return {
        OverlapsWith.NOTHING: 0.0,
        OverlapsWith.LAST_PRODUCT: layers * (last + shared * 2 / 3),
        OverlapsWith.ROUTER: layers * (router + shared / 3),
        OverlapsWith.SHARED: layers * shared / 3,
    }


def busy(rank: RankPlan, machine: Machine) -> tuple[float, float, float]:
    """Predicts (computing, exposed communication, communication) of a stage's micro-batches, without its bubble."""
    compute = compute_seconds(micro_batch_work(rank, machine.kernels), rank, machine) * rank.micro_batches
    exposed = total = 0.0
    free = _windows(rank, machine)
    for one in collectives(rank, machine.kernels):
        if one.axis in PER_STEP:
            continue
        needed = seconds(one, rank, machine)
        hidden = min(needed, free.get(one.hiding, needed))
        if one.hiding in free:
            free[one.hiding] -= hidden
        total += needed
        exposed += needed - hidden
        compute += hidden * machine.overlap_cost.value
    return compute, exposed, total


def _of_data(rank: RankPlan, machine: Machine, window: float) -> tuple[float, float, float]:
    """(slowdown of what runs beside, exposed, all) of gradients and weights, which can hide behind ``window``."""
    slowed = exposed = total = 0.0
    forward, backward = window / 3, window * 2 / 3 / rank.micro_batches  # the last micro-batch's backward
    free = {
        OverlapsWith.BACKWARD: backward,
        OverlapsWith.FORWARD: forward / rank.micro_batches,
        OverlapsWith.NOTHING: 0.0,
    }
    for one in collectives(rank, machine.kernels):
        if one.axis not in PER_STEP:
            continue
        needed = seconds(one, rank, machine)
        if one.hiding is OverlapsWith.BACKWARD and one.count > 1:  # stage 2 reduces after every micro-batch
            free[one.hiding] = max(free[one.hiding], window * 2 / 3)
        hidden = min(needed, free[one.hiding])
        free[one.hiding] -= hidden
        slowed += hidden * machine.overlap_cost.value
        exposed += needed - hidden
        total += needed
    return slowed, exposed, total


def stage_seconds(rank: RankPlan, whole: float, machine: Machine) -> list[float]:
    """Splits ``whole``, a rank's seconds for one micro-batch, over its chunks by what is computed there."""
    head = compute_seconds(head_work(rank, machine.kernels), rank, machine) if rank.has_head else 0.0
    kinds = {kind for chunk in rank.moe_flags for kind in chunk}
    works = {kind: layer_work(rank, frozenset(), machine.kernels, is_moe=kind) for kind in kinds}
    each = {kind: compute_seconds(work, rank, machine) for kind, work in works.items()}
    own = [sum(each[is_moe] for is_moe in chunk) for chunk in rank.moe_flags]
    last = rank.num_stages - 1
    return [
        (whole - head) * layers / sum(own) + head * (stage == last)
        for stage, layers in zip(rank.stages, own, strict=True)
    ]


def _bubble(rank: RankPlan, times: list[float]) -> float:
    """Seconds in which the slowest rank waits; ``times`` of every stage for one micro-batch."""
    pp, schedule = rank.layout.pp, rank.config.parallel.pipeline_schedule
    if pp == 1:
        return 0.0
    if schedule not in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV):
        return bubble_seconds(times, pp, rank.micro_batches)
    # The others work on the first and the last micro-batch; weight gradients, a third of it, fill two thirds.
    others = sum(times) - sum(times[stage] for stage in rank.stages)
    return others / rank.config.parallel.virtual_pipeline_model_parallel_size / 3


def step_time(ranks: list[RankPlan], machine: Machine) -> PredictedStepTime:
    """Predicts a step of a run with these pipeline ranks, each of them once and in order."""
    groups = group_identical_ranks(ranks)
    stages = [busy(group[0], machine) for group in groups]
    slowest = max(range(len(groups)), key=lambda kind: stages[kind][0] + stages[kind][1])
    times = [0.0] * ranks[0].num_stages
    for (compute, exposed, _), group in zip(stages, groups, strict=True):
        chunks = stage_seconds(group[0], (compute + exposed) / group[0].micro_batches, machine)
        for stage, seconds_each in ((s, t) for one in group for s, t in zip(one.stages, chunks, strict=True)):
            times[stage] = seconds_each
    rank, (compute, exposed, communication) = groups[slowest][0], stages[slowest]
    slowed, bare, data = _of_data(rank, machine, compute + exposed)
    training, bubble = rank.config.training, _bubble(rank, times)
    update = compute_seconds(update_work(rank), rank, machine) + machine.step_time.value
    passes = max(micro_batch_work(group[0], machine.kernels).layers for group in groups) * rank.micro_batches
    without = compute + slowed + exposed + bare + bubble + update
    return PredictedStepTime(
        compute=compute + slowed,
        exposed=exposed + bare,
        bubble=bubble,
        update=update,
        launching=max(0.0, passes * machine.host_time.value - without),
        communication=communication + data,
        data=data,
        tokens=training.global_batch_size * training.seq_length,
        devices=rank.layout.world_size,
        flops_per_token=flops_per_token(rank.model, training.seq_length),
        peak=machine.peak.value,
    )
