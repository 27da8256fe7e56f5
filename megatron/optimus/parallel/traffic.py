"""Declares what tensor, context and pipeline parallelism send in one optimizer step, and the communicators of a rank.

Written without torch, so that the planner can read it on any machine; tests count the collectives and groups of real
steps against it. Who changes what a parallelism communicates declares it here.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.optimus.config.costs import FP32, Collective, CollectiveKind, OverlapsWith
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import ContextCommunication, LoadBalancing, PipelineSchedule, QKNormScope
from megatron.optimus.config.stages import num_p2p_groups
from megatron.optimus.models.parameters import rank_parameters


def tensor_traffic(rank: RankPlan) -> Iterator[Collective]:
    """The collectives of regions that tensor parallelism splits (tensor.py)."""
    size, steps, model = rank.layout.tp, rank.micro_batches, rank.model
    if size == 1:
        return
    whole = rank.gathered_bytes
    split_mlps = rank.num_dense_layers + rank.num_moe_layers * (model.moe_shared_expert_intermediate_size > 0)
    regions = (rank.num_layers + split_mlps) * steps
    split = rank.config.parallel.sequence_parallel
    into, out = (
        (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        if split
        else (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_REDUCE)
    )
    if split:
        yield Collective("tp", into, "tokens again, in the backward", size, whole, regions, OverlapsWith.PRODUCTS)
    yield Collective("tp", out, "gradients out of split layers", size, whole, regions, OverlapsWith.PRODUCTS)
    exposed = [(into, "tokens into split layers"), (out, "sums out of split layers")]
    exposed = [*exposed, (into, "gradients into split layers")] if split else exposed[1:]
    for kind, what in exposed:
        if rank.config.parallel.tp_comm_overlap:  # each rank's block to each other one
            sends = (size - 1) * regions
            yield Collective("tp", CollectiveKind.SEND, what, size, whole // size, sends, OverlapsWith.PRODUCTS)
        else:
            yield Collective("tp", kind, what, size, whole, regions)
    norm = FP32 * rank.tokens
    if model.qk_layernorm and model.qk_layernorm_scope is QKNormScope.FULL:
        yield Collective(
            "tp", CollectiveKind.ALL_REDUCE, "squares of split norms", size, norm, 4 * rank.num_layers * steps
        )
    if rank.has_embedding:
        yield Collective("tp", out, "embedding", size, whole, steps)
        if split:
            yield Collective("tp", into, "embedding, gradient", size, whole, steps)
    if rank.has_head:
        if split:
            yield Collective("tp", into, "tokens into the head", size, whole, steps)
        yield Collective("tp", out, "gradient out of the head", size, whole, steps)


def context_traffic(rank: RankPlan) -> Iterator[Collective]:
    """The collectives of attention over sequences that context parallelism cuts (context.py, ring_attention.py)."""
    size = rank.layout.cp
    if size == 1:
        return
    count = rank.num_layers * rank.micro_batches
    queries, keys = rank.queries, rank.keys
    if rank.config.parallel.cp_comm_type is ContextCommunication.A2A:
        together = (queries + 2 * keys) * rank.element_bytes
        yield Collective("cp", CollectiveKind.ALL_TO_ALL, "q, k, v to heads and back", size, together, 2 * count)
        outputs = queries * rank.element_bytes
        yield Collective("cp", CollectiveKind.ALL_TO_ALL, "outputs to positions and back", size, outputs, 2 * count)
        return
    around = (size - 1) * count
    both = 2 * keys
    yield Collective(
        "cp",
        CollectiveKind.SEND,
        "k, v round the ring",
        size,
        both * rank.element_bytes,
        2 * around,
        OverlapsWith.PRODUCTS,
    )
    yield Collective("cp", CollectiveKind.SEND, "their gradients", size, both * FP32, around, OverlapsWith.PRODUCTS)
    yield Collective(
        "cp", CollectiveKind.SEND, "their gradients, back to the owner", size, both * rank.element_bytes, count
    )


def pipeline_traffic(rank: RankPlan) -> Iterator[Collective]:
    """The messages between pipeline stages (pipeline.py)."""
    pp = rank.layout.pp
    if pp == 1:
        return
    v_shape = rank.config.parallel.pipeline_schedule is PipelineSchedule.ZBV
    turns = int(v_shape)  # where a V turns, both stages are on one rank
    forward = sum(stage < rank.num_stages - 1 for stage in rank.stages) - turns * (pp - 1 in rank.stages)
    backward = sum(stage > 0 for stage in rank.stages) - turns * (pp in rank.stages)
    for what, count in (("activations", forward), ("gradients of activations", backward)):
        yield Collective(
            "pp", CollectiveKind.SEND, what, pp, rank.residual_bytes, count * rank.micro_batches, OverlapsWith.PRODUCTS
        )


def partial_gradient_traffic(rank: RankPlan) -> Iterator[Collective]:
    """The sums of gradients of which each tensor-parallel rank has a part (tensor.py, ``register_gradient_sums``)."""
    tp = rank.layout.tp
    if tp > 1 and rank.config.parallel.sequence_parallel:
        repeated = sum(one.numel * count for one, count in rank_parameters(rank).items() if not one.is_tp_sharded)
        what = "gradients of norms and routers"
        yield Collective("tp", CollectiveKind.ALL_REDUCE, what, tp, repeated * FP32, rank.micro_batches)


def num_communicators(rank: RankPlan) -> int:
    """Counts the communicators that a rank is in; a communicator starts when it is first used.

    Each axis along which the program communicates has one, and axes with the same ranks share it (platform/mesh.py).
    Pipeline stages have further ones between them (parallel/pipeline_stages.py).
    """
    layout, model = rank.layout, rank.model
    axes = ["world", "pp", "dense", "cp", "tp", "model"]
    if rank.num_moe_layers:
        axes += ["edp", "experts"]
        if model.moe_router_load_balancing_type is not LoadBalancing.NONE:
            is_global = model.moe_router_load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS
            axes.append("stage" if is_global else "sequence")
    found = {tuple(layout.group_of(axis, 0)) for axis in axes}
    if layout.pp > 1 and not model.untie_embeddings_and_output_weights:
        found.add(tuple(layout.group_of("pp", 0)[:: layout.pp - 1]))  # both ends
    return sum(len(ranks) > 1 for ranks in found) + _num_p2p_groups(rank)


def _num_p2p_groups(rank: RankPlan) -> int:
    parallel, pp = rank.config.parallel, rank.layout.pp
    if pp == 1 or parallel.virtual_pipeline_model_parallel_size == 1:
        return 0
    return 2 * num_p2p_groups(pp, v_shape=parallel.pipeline_schedule is PipelineSchedule.ZBV)
