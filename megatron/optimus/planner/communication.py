"""What a rank sends in one optimizer step: every collective of the program by axis and kind, with its bytes.

``payload`` is the size of the whole tensor (what an all-gather gives, what a reduce-scatter takes); what a rank sends
follows from the ring algorithm: (n - 1) / n of it, twice that for an all-reduce. All-to-all: what leaves the rank.
A test counts the collectives of real steps against this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron.optimus.config.schema import (
    ContextCommunication,
    LoadBalancing,
    PipelineSchedule,
    QKNormScope,
    TokenDispatcherType,
)
from megatron.optimus.config.stages import num_p2p_groups
from megatron.optimus.planner.activations import INT32, INT64, Kernels
from megatron.optimus.planner.parameters import families, gradient_bytes, parameters
from megatron.optimus.planner.ring import FP32
from megatron.optimus.planner.share import Share


class Kind(str, Enum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


class Hiding(str, Enum):
    """What the device does meanwhile."""

    NOTHING = "nothing"
    BACKWARD = "the last backward"
    FORWARD = "the next forward"
    PRODUCTS = "matrix products beside it"
    ROUTER = "the router and the shared experts"
    SHARED = "the shared experts"
    LAST_PRODUCT = "the last product of the experts' backward, and the shared experts'"


@dataclass(frozen=True)
class Collective:
    """``count`` equal collectives a step, each over ``size`` ranks of an axis."""

    axis: str
    kind: Kind
    purpose: str
    size: int
    payload: int  # bytes of one
    count: int
    hiding: Hiding = Hiding.NOTHING

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        share = {Kind.ALL_REDUCE: 2 * (self.size - 1) / self.size, Kind.SEND: 1.0}
        return self.count * self.payload * share.get(self.kind, (self.size - 1) / self.size)


def collectives(share: Share, kernels: Kernels) -> list[Collective]:
    """Everything that moves activations, gradients or weights, largest groups last; scalars are left out."""
    found = [*_tensor(share), *_context(share), *_experts(share, kernels), *_pipeline(share), *_data(share)]
    return [one for one in found if one.size > 1 and one.count > 0]


def num_communicators(share: Share) -> int:
    """Those that a rank is in: of the axes along which the program communicates, those with the same ranks counted once
    (platform/mesh.py), and those between pipeline stages (parallel/pipeline_stages.py). A communicator starts when
    it is first used."""
    layout, model = share.layout, share.model
    axes = ["world", "pp", "dense", "cp", "tp", "model"]
    if share.num_moe_layers:
        axes += ["edp", "experts"]
        if model.moe_router_load_balancing_type is not LoadBalancing.NONE:
            is_global = model.moe_router_load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS
            axes.append("stage" if is_global else "sequence")
    found = {tuple(layout.group_of(axis, 0)) for axis in axes}
    if layout.pp > 1 and not model.untie_embeddings_and_output_weights:
        found.add(tuple(layout.group_of("pp", 0)[:: layout.pp - 1]))  # both ends
    return sum(len(ranks) > 1 for ranks in found) + _num_p2p_groups(share)


def _num_p2p_groups(share: Share) -> int:
    parallel, pp = share.config.parallel, share.layout.pp
    if pp == 1 or parallel.virtual_pipeline_model_parallel_size == 1:
        return 0
    return 2 * num_p2p_groups(pp, v_shape=parallel.pipeline_schedule is PipelineSchedule.ZBV)


def sent_by_axis(found: list[Collective]) -> dict[str, float]:
    """Bytes a rank sends in a step along each axis."""
    totals: dict[str, float] = {}
    for one in found:
        totals[one.axis] = totals.get(one.axis, 0.0) + one.sent
    return totals


def _tensor(share: Share) -> Iterator[Collective]:
    size, steps, model = share.layout.tp, share.micro_batches, share.model
    if size == 1:
        return
    whole = share.tokens * model.hidden_size * share.element
    split_mlps = share.num_dense_layers + share.num_moe_layers * (model.moe_shared_expert_intermediate_size > 0)
    regions = (share.num_layers + split_mlps) * steps
    split = share.config.parallel.sequence_parallel
    into, out = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if split else (Kind.ALL_REDUCE, Kind.ALL_REDUCE)
    if split:
        yield Collective("tp", into, "tokens again, in the backward", size, whole, regions, Hiding.PRODUCTS)
    yield Collective("tp", out, "gradients out of split layers", size, whole, regions, Hiding.PRODUCTS)
    exposed = [(into, "tokens into split layers"), (out, "sums out of split layers")]
    exposed = [*exposed, (into, "gradients into split layers")] if split else exposed[1:]
    for kind, what in exposed:
        if share.config.parallel.tp_comm_overlap:  # each rank's block to each other one
            sends = (size - 1) * regions
            yield Collective("tp", Kind.SEND, what, size, whole // size, sends, Hiding.PRODUCTS)
        else:
            yield Collective("tp", kind, what, size, whole, regions)
    norm = FP32 * share.tokens
    if model.qk_layernorm and model.qk_layernorm_scope is QKNormScope.FULL:
        yield Collective("tp", Kind.ALL_REDUCE, "squares of split norms", size, norm, 4 * share.num_layers * steps)
    if share.has_embedding:
        yield Collective("tp", out, "embedding", size, whole, steps)
        if split:
            yield Collective("tp", into, "embedding, gradient", size, whole, steps)
    if share.has_head:
        if split:
            yield Collective("tp", into, "tokens into the head", size, whole, steps)
        yield Collective("tp", out, "gradient out of the head", size, whole, steps)


def _context(share: Share) -> Iterator[Collective]:
    size, model = share.layout.cp, share.model
    if size == 1:
        return
    count = share.num_layers * share.micro_batches
    queries = share.tokens * model.num_attention_heads * model.head_dim // share.layout.tp
    keys = share.tokens * model.num_kv_heads * model.head_dim // share.layout.tp
    if share.config.parallel.cp_comm_type is ContextCommunication.A2A:
        together = (queries + 2 * keys) * share.element
        yield Collective("cp", Kind.ALL_TO_ALL, "q, k, v to heads and back", size, together, 2 * count)
        outputs = queries * share.element
        yield Collective("cp", Kind.ALL_TO_ALL, "outputs to positions and back", size, outputs, 2 * count)
        return
    around = (size - 1) * count
    both = 2 * keys
    yield Collective("cp", Kind.SEND, "k, v round the ring", size, both * share.element, 2 * around, Hiding.PRODUCTS)
    yield Collective("cp", Kind.SEND, "their gradients", size, both * FP32, around, Hiding.PRODUCTS)
    yield Collective("cp", Kind.SEND, "their gradients, back to the owner", size, both * share.element, count)


def _experts(share: Share, kernels: Kernels) -> Iterator[Collective]:
    model, parallel = share.model, share.config.parallel
    layers = share.num_moe_layers * share.micro_batches
    if model.moe_router_load_balancing_type is not LoadBalancing.NONE:
        is_global = model.moe_router_load_balancing_type is LoadBalancing.GLOBAL_AUX_LOSS
        layout = share.layout
        size = layout.dp * layout.cp * layout.tp if is_global else layout.cp * layout.tp
        axis = "stage" if is_global else "sequence"
        yield Collective(axis, Kind.ALL_REDUCE, "counts of experts", size, model.num_experts * INT64, layers)
    size, topk = share.expert_ranks, model.moe_router_topk
    router, last = (Hiding.ROUTER, Hiding.LAST_PRODUCT) if kernels.overlaps_collectives else (Hiding.NOTHING,) * 2
    if parallel.moe_token_dispatcher_type is TokenDispatcherType.ALLGATHER:
        rows = share.tokens_outside * size
        wide, weights = rows * model.hidden_size * share.element, rows * topk * FP32
        yield Collective("experts", Kind.ALL_GATHER, "tokens to experts", size, wide, layers, router)
        yield Collective("experts", Kind.ALL_GATHER, "router weights, expert numbers", size, 2 * weights, layers)
        yield Collective("experts", Kind.REDUCE_SCATTER, "sums from experts", size, wide, layers)
        yield Collective("experts", Kind.ALL_GATHER, "gradients to experts", size, wide, layers)
        yield Collective("experts", Kind.REDUCE_SCATTER, "gradients from experts", size, wide, layers, last)
        yield Collective("experts", Kind.REDUCE_SCATTER, "gradients of router weights", size, weights, layers, last)
        return
    rows = share.rows_needed
    if parallel.moe_token_dispatcher_type is TokenDispatcherType.SYMMETRIC:
        row, choices = model.hidden_size * share.element, share.rows * topk
        wide, whole, copies = rows * row, share.rows * row, Hiding.LAST_PRODUCT  # whole blocks, by the copy engines
        yield Collective("experts", Kind.ALL_TO_ALL, "tokens, results, their gradients", size, wide, 3 * layers)
        yield Collective("experts", Kind.ALL_TO_ALL, "gradients from experts", size, whole, layers, copies)
        yield Collective("experts", Kind.ALL_GATHER, "router weights", size, choices * FP32, layers)
        yield Collective("experts", Kind.ALL_GATHER, "expert numbers", size, choices * INT32, layers)
        gradients = choices // size * FP32  # each choice is served by one rank
        yield Collective("experts", Kind.ALL_TO_ALL, "gradients of router weights", size, gradients, layers)
        return
    there = Hiding.SHARED if kernels.overlaps_collectives else Hiding.NOTHING
    wide, weights = rows * model.hidden_size * share.element, rows * topk * FP32
    yield Collective("experts", Kind.ALL_TO_ALL, "numbers of rows", size, size * INT64, layers)
    yield from _in_parts(share, kernels, "tokens", wide, layers, there)
    yield from _in_parts(share, kernels, "results, their gradients", wide, 2 * layers, Hiding.NOTHING)
    yield from _in_parts(share, kernels, "gradients from experts", wide, layers, last)
    yield Collective("experts", Kind.ALL_TO_ALL, "router weights, expert numbers", size, 2 * weights, layers)
    yield Collective("experts", Kind.ALL_TO_ALL, "gradients of router weights", size, weights, layers, last)


def _in_parts(
    share: Share, kernels: Kernels, purpose: str, payload: int, count: int, whole: Hiding
) -> Iterator[Collective]:
    """All-to-alls that travel in parts, each beside another's products: one of them is always alone. ``whole``: what
    they hide behind in one part. Where collectives take multiprocessors from products, parts gained nothing."""
    parts, size = share.config.parallel.moe_dispatch_chunks, share.expert_ranks
    if parts > 1:
        beside = Hiding.PRODUCTS if kernels.overlaps_collectives else Hiding.NOTHING
        yield Collective("experts", Kind.ALL_TO_ALL, purpose, size, payload // parts, count * (parts - 1), beside)
        payload, whole = payload - payload // parts * (parts - 1), Hiding.NOTHING
    yield Collective("experts", Kind.ALL_TO_ALL, purpose, size, payload, count, whole)


def _pipeline(share: Share) -> Iterator[Collective]:
    pp = share.layout.pp
    if pp == 1:
        return
    hidden = share.tokens_outside * share.model.hidden_size * share.element
    v_shape = share.config.parallel.pipeline_schedule is PipelineSchedule.ZBV
    turns = int(v_shape)  # where a V turns, both stages are on one rank
    forward = sum(stage < share.num_stages - 1 for stage in share.stages) - turns * (pp - 1 in share.stages)
    backward = sum(stage > 0 for stage in share.stages) - turns * (pp in share.stages)
    for what, count in (("activations", forward), ("gradients of activations", backward)):
        yield Collective("pp", Kind.SEND, what, pp, hidden, count * share.micro_batches, Hiding.PRODUCTS)


def _data(share: Share) -> Iterator[Collective]:
    options, layout = share.config.optimizer, share.layout
    _, sent = gradient_bytes(share)
    repeats = share.micro_batches if options.zero_stage == 2 else 1
    is_tied = layout.pp > 1 and not share.model.untie_embeddings_and_output_weights
    reduces = options.overlap_grad_reduce and len(share.stages) == 1
    into = Hiding.BACKWARD if reduces else Hiding.NOTHING
    out = Hiding.FORWARD if options.overlap_param_gather else Hiding.NOTHING
    for family in families(share):
        axis = "edp" if family.is_expert else "dense"
        what = "expert" if family.is_expert else "other"
        whole = family.numel
        yield Collective(axis, Kind.REDUCE_SCATTER, f"{what} gradients", family.group_size, whole * sent, repeats, into)
        yield Collective(axis, Kind.ALL_GATHER, f"{what} weights", family.group_size, whole * share.element, 1, out)
    if is_tied and (share.has_embedding or share.has_head):
        table = share.model.vocab_size // layout.tp * share.model.hidden_size * gradient_bytes(share)[0]
        table = -(-table // (layout.dp * layout.cp))  # of each rank's shard, after the reduction
        yield Collective("pp", Kind.ALL_REDUCE, "gradient of the tied embedding", 2, table, 1)
    if layout.tp > 1 and share.config.parallel.sequence_parallel:
        repeated = sum(one.numel * count for one, count in parameters(share).items() if not one.is_cut)
        what = "gradients of norms and routers"
        yield Collective("tp", Kind.ALL_REDUCE, what, layout.tp, repeated * FP32, share.micro_batches)
