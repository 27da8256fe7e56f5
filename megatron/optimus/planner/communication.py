"""Lists what a rank sends in one optimizer step: every collective of the program by axis and kind, with its bytes.

Those of MoE layers are declared in moe/traffic.py. A test counts the collectives of real steps against this list.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.optimus.config.costs import FP32, Collective, Hiding, Kind
from megatron.optimus.config.schema import ContextCommunication, LoadBalancing, PipelineSchedule, QKNormScope
from megatron.optimus.config.stages import num_p2p_groups
from megatron.optimus.models.activations import Kernels
from megatron.optimus.moe.traffic import dispatcher_traffic, router_traffic
from megatron.optimus.planner.optimizer_state import flat_buffers, parameters
from megatron.optimus.planner.rank_plan import RankPlan


def collectives(rank: RankPlan, kernels: Kernels) -> list[Collective]:
    """Lists all that moves activations, gradients or weights, largest groups last; scalars are left out."""
    layers = rank.num_moe_layers * rank.micro_batches
    dispatch = dispatcher_traffic(rank).collectives(rank, layers, overlaps=kernels.overlaps_collectives)
    moe = [*router_traffic(rank, layers), *dispatch]
    found = [*_tensor(rank), *_context(rank), *moe, *_pipeline(rank), *_data(rank)]
    return [one for one in found if one.size > 1 and one.count > 0]


def num_communicators(rank: RankPlan) -> int:
    """Counts the communicators that a rank is in; one starts when it is first used.

    They are those of the axes along which the program communicates, those with the same ranks once (platform/mesh.py),
    and those between pipeline stages (parallel/pipeline_p2p.py).
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


def sent_by_axis(found: list[Collective]) -> dict[str, float]:
    """Sums the bytes that a rank sends in a step along each axis."""
    totals: dict[str, float] = {}
    for one in found:
        totals[one.axis] = totals.get(one.axis, 0.0) + one.sent
    return totals


def _tensor(rank: RankPlan) -> Iterator[Collective]:
    size, steps, model = rank.layout.tp, rank.micro_batches, rank.model
    if size == 1:
        return
    whole = rank.gathered
    split_mlps = rank.num_dense_layers + rank.num_moe_layers * (model.moe_shared_expert_intermediate_size > 0)
    regions = (rank.num_layers + split_mlps) * steps
    split = rank.config.parallel.sequence_parallel
    into, out = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if split else (Kind.ALL_REDUCE, Kind.ALL_REDUCE)
    if split:
        yield Collective("tp", into, "tokens again, in the backward", size, whole, regions, Hiding.PRODUCTS)
    yield Collective("tp", out, "gradients out of split layers", size, whole, regions, Hiding.PRODUCTS)
    exposed = [(into, "tokens into split layers"), (out, "sums out of split layers")]
    exposed = [*exposed, (into, "gradients into split layers")] if split else exposed[1:]
    for kind, what in exposed:
        if rank.config.parallel.tp_comm_overlap:  # each rank's block to each other one
            sends = (size - 1) * regions
            yield Collective("tp", Kind.SEND, what, size, whole // size, sends, Hiding.PRODUCTS)
        else:
            yield Collective("tp", kind, what, size, whole, regions)
    norm = FP32 * rank.tokens
    if model.qk_layernorm and model.qk_layernorm_scope is QKNormScope.FULL:
        yield Collective("tp", Kind.ALL_REDUCE, "squares of split norms", size, norm, 4 * rank.num_layers * steps)
    if rank.has_embedding:
        yield Collective("tp", out, "embedding", size, whole, steps)
        if split:
            yield Collective("tp", into, "embedding, gradient", size, whole, steps)
    if rank.has_head:
        if split:
            yield Collective("tp", into, "tokens into the head", size, whole, steps)
        yield Collective("tp", out, "gradient out of the head", size, whole, steps)


def _context(rank: RankPlan) -> Iterator[Collective]:
    size = rank.layout.cp
    if size == 1:
        return
    count = rank.num_layers * rank.micro_batches
    queries, keys = rank.queries, rank.keys
    if rank.config.parallel.cp_comm_type is ContextCommunication.A2A:
        together = (queries + 2 * keys) * rank.element
        yield Collective("cp", Kind.ALL_TO_ALL, "q, k, v to heads and back", size, together, 2 * count)
        outputs = queries * rank.element
        yield Collective("cp", Kind.ALL_TO_ALL, "outputs to positions and back", size, outputs, 2 * count)
        return
    around = (size - 1) * count
    both = 2 * keys
    yield Collective("cp", Kind.SEND, "k, v round the ring", size, both * rank.element, 2 * around, Hiding.PRODUCTS)
    yield Collective("cp", Kind.SEND, "their gradients", size, both * FP32, around, Hiding.PRODUCTS)
    yield Collective("cp", Kind.SEND, "their gradients, back to the owner", size, both * rank.element, count)


def _pipeline(rank: RankPlan) -> Iterator[Collective]:
    pp = rank.layout.pp
    if pp == 1:
        return
    v_shape = rank.config.parallel.pipeline_schedule is PipelineSchedule.ZBV
    turns = int(v_shape)  # where a V turns, both stages are on one rank
    forward = sum(stage < rank.num_stages - 1 for stage in rank.stages) - turns * (pp - 1 in rank.stages)
    backward = sum(stage > 0 for stage in rank.stages) - turns * (pp in rank.stages)
    for what, count in (("activations", forward), ("gradients of activations", backward)):
        yield Collective("pp", Kind.SEND, what, pp, rank.stream, count * rank.micro_batches, Hiding.PRODUCTS)


def _data(rank: RankPlan) -> Iterator[Collective]:
    options, layout = rank.config.optimizer, rank.layout
    repeats = rank.micro_batches if options.zero_stage == 2 else 1
    is_tied = layout.pp > 1 and not rank.model.untie_embeddings_and_output_weights
    reduces = options.overlap_grad_reduce and len(rank.stages) == 1
    into = Hiding.BACKWARD if reduces else Hiding.NOTHING
    out = Hiding.FORWARD if options.overlap_param_gather else Hiding.NOTHING
    for buffer in flat_buffers(rank):
        axis, what = ("edp", "expert") if buffer.is_expert else ("dense", "other")
        size, sent, weights = buffer.group_size, buffer.numel * rank.sent_gradient_element, buffer.numel * rank.element
        yield Collective(axis, Kind.REDUCE_SCATTER, f"{what} gradients", size, sent, repeats, into)
        yield Collective(axis, Kind.ALL_GATHER, f"{what} weights", size, weights, 1, out)
    if is_tied and (rank.has_embedding or rank.has_head):
        table = rank.model.vocab_size // layout.tp * rank.model.hidden_size * rank.gradient_element
        table = -(-table // (layout.dp * layout.cp))  # of each rank's shard, after the reduction
        yield Collective("pp", Kind.ALL_REDUCE, "gradient of the tied embedding", 2, table, 1)
    if layout.tp > 1 and rank.config.parallel.sequence_parallel:
        repeated = sum(one.numel * count for one, count in parameters(rank).items() if not one.is_cut)
        what = "gradients of norms and routers"
        yield Collective("tp", Kind.ALL_REDUCE, what, layout.tp, repeated * FP32, rank.micro_batches)
