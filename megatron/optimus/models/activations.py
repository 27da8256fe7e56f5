"""Declares the bytes that one micro-batch needs in a layer, in the embedding and in the head, part by part.

Counted are the tensors that the program's own code creates, and what a device's kernels keep and allocate
(``Kernels``). Written without torch, so that the planner can read it on any machine; tests hold it against what real
layers leave alive and against their peaks. Who changes what a layer keeps declares it here.

Letters as in the code: T tokens, D model width, H heads x head width, G key/value heads x head width, F inner width,
E experts, K experts per token, R rows of tokens at the experts of this rank, P rows in expert order, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.costs import FP32, INT32, INT64, PartMemory
from megatron.optimus.config.family import family_of
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import ContextCommunication, Normalization, QKNormScope, Recompute
from megatron.optimus.moe.traffic import dispatcher_traffic

LOSS_CHUNK = 2**27  # logits held at once in fp32, layers/loss.py


@dataclass(frozen=True)
class Kernels:
    """What a device's kernels keep and allocate."""

    fused_norm: bool  # torch's RMSNorm keeps its input and one number a row, else also its normalised output
    fused_elementwise: bool  # ops/elementwise.py has kernels, and LayerNorm needs no fp32 copy
    row_tile: int  # rows of an expert start at a multiple of it; what the backward needs is kept without padding
    keeps_order: bool  # the expert kernels keep the order of rows; else the experts' numbers
    counts_workspace: bool = True  # the expert kernels' temporary rows come from torch's allocator
    adds_gradients: bool = True  # the expert kernels can add weight gradients to the optimizer's buffers
    splits_backward: bool = True  # into two halves, of which the second gives the gradient of gate_up alone
    overlaps_collectives: bool = True  # as platform/device.py
    norm_width: int = 0  # widest RMSNorm for which ops/norm.py has kernels: they keep nothing but its input
    router_experts: int = 0  # most experts for which ops/router_statistics.py has kernels: they keep nothing
    # Of the ring's kernels (layers/partial_attention.py), see RingSizes.
    ring_scratch: int = 0
    ring_workspace: int = 0
    ring_repeats: bool = True
    multiprocessors: int = 0  # deterministic FlashAttention-2 has gradients of queries for every so many blocks


# csrc/cuda and ops/triton. cuDNN's attention has the gradients of its queries in fp32.
CUDA = Kernels(
    fused_norm=True,
    fused_elementwise=True,
    row_tile=128,
    keeps_order=True,
    overlaps_collectives=False,
    norm_width=2**15,
    router_experts=1024,
    ring_scratch=FP32,
    ring_repeats=False,
    multiprocessors=132,
)
# ops/sycl. Attention over parts: four times fp32 scores, as many as MAX_SCORES.
XPU = Kernels(fused_norm=True, fused_elementwise=False, row_tile=1, keeps_order=True, ring_workspace=4 * 2**26 * FP32)
CPU = Kernels(  # csrc/cpu
    fused_norm=False,
    fused_elementwise=False,
    row_tile=1,
    keeps_order=False,
    counts_workspace=False,
    splits_backward=False,
)


def layer_parts(
    rank: RankPlan, kernels: Kernels, recompute: frozenset[Recompute], *, is_moe: bool, offload: bool
) -> list[PartMemory]:
    """Lists the parts of one layer in the order of the forward.

    ``recompute``: the parts that it recomputes in the backward; ``offload``: what it saves waits in host memory.
    """
    again = Recompute.MOE in recompute
    if is_moe:
        mlp = _experts(rank, kernels, again)
    else:
        mlp = [_mlp("mlp", rank, kernels, rank.model.ffn_hidden_size, recomputes=again)]
    norms = Recompute.NORM in recompute
    parts = [
        _norm("attention norm", rank, kernels, recomputes=norms),
        _attention(rank, kernels, recompute),
        _norm("mlp norm", rank, kernels, recomputes=norms),
        *mlp,
    ]
    return [part.offloaded() for part in parts] if offload else parts


def _norm(name: str, rank: RankPlan, kernels: Kernels, *, recomputes: bool) -> PartMemory:
    """A norm keeps its input, the residual; its output, which the part behind keeps; and torch's its statistics."""
    tokens, width, stream = rank.sequence_parallel_tokens, rank.model.hidden_size, rank.residual_bytes
    is_parametric = rank.model.normalization is not Normalization.LAYERNORM_NONPARAMETRIC
    if is_parametric and width <= kernels.norm_width:
        statistics = 0
    elif is_parametric:
        statistics = FP32 * tokens + (0 if kernels.fused_norm else stream)
    else:
        statistics = 2 * FP32 * tokens
    part = PartMemory(name, 2 * stream + statistics, stream, 2 * stream)
    if not (is_parametric or kernels.fused_elementwise):  # on an fp32 copy of the input
        wide = tokens * width * FP32
        part = PartMemory(name, wide + stream + statistics, wide, 3 * wide)
    return part.recomputed(2 * stream) if recomputes else part


def norm_rotates(rank: RankPlan, kernels: Kernels) -> bool:
    """Whether the norm of queries and keys and RoPE are one kernel (layers/attention.py)."""
    model = rank.model
    per_head = model.qk_layernorm_scope is QKNormScope.HEAD
    width = model.head_dim * (1 if per_head else model.num_attention_heads)
    is_whole = per_head or rank.layout.tp == 1  # else TensorParallelRMSNorm
    return model.qk_layernorm and model.clip_qkv is None and is_whole and width <= kernels.norm_width


def _qk_norm_kept(rank: RankPlan, kernels: Kernels, recompute: frozenset[Recompute]) -> int:
    """Bytes that the norms of queries and keys keep: what they read, and beside it statistics or their results."""
    model, tp, tokens = rank.model, rank.layout.tp, rank.tokens
    if not model.qk_layernorm:
        return 0
    read = (rank.queries + rank.keys) * rank.element_bytes
    per_head = model.qk_layernorm_scope is QKNormScope.HEAD
    heads = tokens * model.num_attention_heads // tp + tokens * model.num_kv_heads // tp
    statistics = (heads if per_head else 2 * tokens) * FP32
    if Recompute.NORM in recompute and Recompute.ATTENTION not in recompute:
        return read
    if not per_head and tp > 1:  # TensorParallelRMSNorm: fp32 before and after
        return (rank.queries + rank.keys) * 2 * FP32 + statistics
    if norm_rotates(rank, kernels):
        return read
    return read + statistics + (0 if kernels.fused_norm else read)


def _attention(rank: RankPlan, kernels: Kernels, recompute: frozenset[Recompute]) -> PartMemory:
    """Projections, norms of queries and keys, RoPE, attention over this rank's heads, and the output projection."""
    model, layout, element, tokens = rank.model, rank.layout, rank.element_bytes, rank.tokens
    queries, keys = rank.queries, rank.keys
    head_tokens = tokens * model.num_attention_heads // layout.tp
    norm = _qk_norm_kept(rank, kernels, recompute)
    if model.clip_qkv is not None:
        norm += (queries + 2 * keys) * element
    core = head_tokens * FP32 + (queries + 2 * keys + queries) * element
    if layout.cp > 1 and rank.config.parallel.cp_comm_type is ContextCommunication.A2A:
        per_rank = model.num_kv_heads // layout.tp
        repeats = math.lcm(per_rank, layout.cp) // per_rank
        core += (2 * keys * (repeats - 1) + queries) * element  # the output a second time, in its own positions
    own = attention_kept(rank)
    core += own
    gathered = rank.gathered_bytes
    outside = rank.residual_bytes
    # Of RoPE: fp32 copies, or its result beside what it has read, which lives to the end of the forward by name.
    rope = max(queries, keys) * element if kernels.fused_elementwise else 4 * max(queries, keys) * FP32
    read = (queries + keys) * element if kernels.fused_elementwise else rope + queries * element
    read = 0 if norm_rotates(rank, kernels) else read  # what is kept for the norm
    weights = (2 * queries + 2 * keys) // tokens * model.hidden_size * element
    gradients = (3 * queries + 2 * keys) * element + outside + own
    forward = max(gathered + read, _leaving(rank))
    backward = gathered + gradients + max(rope, weights)
    if layout.cp > 1 and rank.config.parallel.cp_comm_type is ContextCommunication.P2P:
        ring = ring_sizes(rank, kernels)
        # What RoPE has read lives to the end of the forward, by name; with norms it is kept for the backward anyway.
        read = 0 if model.qk_layernorm else (queries + keys) * element
        forward = max(forward, read + forward_bytes(ring))
        output_weight = queries // tokens * model.hidden_size * element  # its gradient has just been computed
        backward = max(backward, outside + output_weight + backward_bytes(ring))
    part = PartMemory("attention", norm + core, forward, backward)
    if Recompute.ATTENTION in recompute:
        # What came from other ranks is not asked for again.
        kept = gathered if rank.config.parallel.sequence_parallel else 0
        if layout.cp > 1 and rank.config.parallel.cp_comm_type is ContextCommunication.A2A:
            kept += (2 * queries + 2 * keys) * element
        elif layout.cp > 1:
            kept += queries * element + head_tokens * FP32
        part = part.recomputed(kept)
    return part


def attention_kept(rank: RankPlan) -> int:
    """Bytes that the attention of the model's family keeps besides those of the decoder's."""
    return rank.tokens * family_of(rank.model).attention_kept(rank.model, rank.element_bytes) // rank.layout.tp


def ring_sizes(rank: RankPlan, kernels: Kernels) -> RingSizes:
    """The rank of ring attention on this rank."""
    heads = rank.model.num_attention_heads // rank.layout.tp
    scratch, repeats = kernels.ring_scratch, kernels.ring_repeats
    if rank.config.training.deterministic and kernels.multiprocessors:
        # Contiguous copies of gradient and output; a sum for each group of blocks that work on the same head; gradients
        # of keys and values for every query head.
        scratch = 2 * rank.element_bytes + FP32 * -(-kernels.multiprocessors // (rank.sequences * heads))
        repeats = True
    workspace, ranks = kernels.ring_workspace, rank.layout.cp
    return RingSizes(rank.queries, rank.keys, rank.element_bytes, ranks, scratch, workspace, repeats)


def _leaving(rank: RankPlan) -> int:
    """Bytes to sum a split layer's results over the tensor-parallel ranks: partial sums and result.

    In blocks (--tp-comm-overlap) also those of the other ranks' tokens, all on their way when the last one is made.
    """
    tp, partial = rank.layout.tp, rank.gathered_bytes
    in_blocks = rank.config.parallel.tp_comm_overlap
    return partial + rank.residual_bytes + (partial * (tp - 1) // tp if in_blocks else 0)


def _mlp(name: str, rank: RankPlan, kernels: Kernels, width: int, *, recomputes: bool) -> PartMemory:
    """An MLP keeps gate, up, silu(gate) unless its product with up is one kernel, and that product.

    ``width``: the inner one.
    """
    layout, element, tokens = rank.layout, rank.element_bytes, rank.tokens
    inner = tokens * width // layout.tp * element
    gathered = rank.gathered_bytes
    outside = rank.residual_bytes
    weights = 2 * (inner // tokens) * rank.model.hidden_size
    saved = (3 if kernels.fused_elementwise else 4) * inner
    part = PartMemory(name, saved, _leaving(rank), gathered + outside + 2 * inner + max(inner, weights))
    if recomputes:
        part = part.recomputed(gathered if rank.config.parallel.sequence_parallel else 0)
    return part


def _shared_experts(rank: RankPlan, kernels: Kernels, gathered: int, *, recomputes: bool) -> PartMemory:
    """The MLP, and what the gate's product keeps.

    Beside it lie the ``gathered`` rows of the routed experts, in the backward their gradients, and the gradient of the
    layer's input.
    """
    model, tokens, element, stream = rank.model, rank.sequence_parallel_tokens, rank.element_bytes, rank.residual_bytes
    part = _mlp("shared experts", rank, kernels, model.moe_shared_expert_intermediate_size, recomputes=recomputes)
    gate = stream + tokens * element if model.moe_shared_expert_gate else 0
    return PartMemory(part.name, part.saved + gate, part.forward + gathered, part.backward + gathered + stream)


def rows_in_expert_order(rank: RankPlan, kernels: Kernels) -> int:
    """Computes P, room for every choice of every row, whichever experts are chosen."""
    slots = dispatcher_traffic(rank).rows(rank) * rank.model.moe_router_topk
    local = rank.model.num_experts // rank.layout.ep
    if kernels.row_tile == 1:
        return slots
    return (slots // kernels.row_tile + min(local, slots)) * kernels.row_tile + kernels.row_tile


def _experts(rank: RankPlan, kernels: Kernels, recomputes: bool) -> list[PartMemory]:
    """Router, exchange of tokens, shared experts beside it, and experts."""
    model, element = rank.model, rank.element_bytes
    tokens, topk, stream = rank.sequence_parallel_tokens, model.moe_router_topk, rank.residual_bytes
    dispatcher, exchanges = dispatcher_traffic(rank), rank.expert_ranks > 1
    rows = dispatcher.rows(rank)
    scores = tokens * model.num_experts * FP32
    numbers = tokens * topk * INT64
    numbers += 0 if model.num_experts <= kernels.router_experts else 4 * tokens * FP32  # sums of rows, for losses
    gathered = rows * model.hidden_size * element if exchanges else 0
    # The tokens' arrival may be under way while the router works.
    early = gathered if dispatcher.sends_before_router else 0
    router = PartMemory("router", 2 * scores + numbers, stream * FP32 // element + early, 3 * stream)
    sent = dispatcher.saved_bytes(rank, recomputes=recomputes)
    exchange = PartMemory("exchange", sent, gathered, gathered + stream)
    experts = _expert_products(rank, kernels, rows)
    kept = gathered + rows * topk * FP32  # the rows and their weights
    indices = 0 if kernels.keeps_order else rows * topk * INT32 * int(exchanges)
    experts = PartMemory(
        "experts", kept + indices + experts.saved, experts.forward, experts.backward + gathered + stream
    )
    if recomputes:
        arguments = kept + rows * topk * INT32 * int(exchanges)
        experts = experts.recomputed(arguments)
    if not model.moe_shared_expert_intermediate_size:
        return [router, exchange, experts]
    shared = _shared_experts(rank, kernels, gathered, recomputes=recomputes)
    # The shared experts' result waits for that of the routed ones.
    waiting = 0 if model.moe_shared_expert_gate else stream
    return [
        router,
        exchange,
        shared,
        PartMemory(experts.name, experts.saved, experts.forward + waiting, experts.backward),
    ]


def _expert_products(rank: RankPlan, kernels: Kernels, rows: int) -> PartMemory:
    """The grouped products keep hidden [T K, 2F], but no rows, activation or gradients (csrc/cuda/moe_mlp.cpp)."""
    model, element = rank.model, rank.element_bytes
    local = model.num_experts // rank.layout.ep
    order, inner = rows_in_expert_order(rank, kernels), model.moe_ffn_hidden_size // rank.layout.etp
    slots = rows * model.moe_router_topk
    wide, narrow = order * model.hidden_size * element, order * inner * element
    hidden = 2 * slots * inner * element
    index = (order + slots) * INT32 + order // kernels.row_tile * INT32 if kernels.keeps_order else 0
    weights = 3 * local * inner * model.hidden_size * element
    if kernels.adds_gradients and rank.adds_expert_gradients:  # 16-bit buffers are added to from fp32
        weights = 0 if rank.gradient_element_bytes == FP32 else weights * FP32 // element
    rows_in = rows * model.hidden_size * element
    if not kernels.counts_workspace:
        return PartMemory("experts", hidden, rows_in, rows_in + weights)
    backward = 3 * wide + 3 * narrow + order * FP32 + rows_in + weights
    return PartMemory("experts", hidden + index, wide + narrow + rows_in, backward)


def _keeps_16_bits(rank: RankPlan, kernels: Kernels) -> bool:
    """Whether logits are never brought to fp32."""
    return kernels.fused_elementwise and rank.element_bytes == 2


def loss_chunk(rank: RankPlan, kernels: Kernels) -> int:
    """Number of logits held at once."""
    return LOSS_CHUNK * (2 if _keeps_16_bits(rank, kernels) else 1)


def head_parts(rank: RankPlan, kernels: Kernels) -> list[PartMemory]:
    """Final norm, and output projection with loss, which makes its gradients in the forward (layers/loss.py)."""
    model, element, tokens = rank.model, rank.element_bytes, rank.tokens
    outside = rank.residual_bytes
    norm = _norm("final norm", rank, kernels, recomputes=False)
    norm = PartMemory(norm.name, norm.saved - outside, norm.forward, norm.backward)  # the loss does not keep its output
    stream = tokens * model.hidden_size * element
    vocabulary = model.vocab_size // rank.layout.tp
    weight = vocabulary * model.hidden_size
    rows = max(1, loss_chunk(rank, kernels) // vocabulary)
    first, second = (min(rows, max(0, tokens - start)) * vocabulary for start in (0, rows))
    # In fp32 twice at once (exponentials), or beside gradients and a part of the weight's. While the second chunk's
    # logits are made and brought to fp32, those of the first and their gradients are still there.
    logits = max(2 * first * FP32, first * (FP32 + element) + weight * element)
    if second:
        logits = max(logits, (first + second) * (FP32 + element))
    if _keeps_16_bits(rank, kernels):
        logits = (first + second) * element  # the weight's gradient is added to by its product
    saved = stream + weight * FP32
    loss = PartMemory("loss", saved, outside + rank.gathered_bytes + logits, stream + weight * element)
    return [norm, loss]


def rope_table_bytes(rank: RankPlan) -> int:
    """Bytes of cos and sin in fp32, which all layers share."""
    return 2 * rank.config.training.seq_length * rank.model.head_dim * FP32


def embedding_part(rank: RankPlan) -> PartMemory:
    """The embedding keeps nothing but token numbers; its gradient is as large as the table."""
    table = rank.model.vocab_size // rank.layout.tp * rank.model.hidden_size * rank.element_bytes
    return PartMemory("embedding", 0, rank.tokens * rank.model.hidden_size * rank.element_bytes, table)


# ---- ring attention (ring_attention.py and partial_attention.py)
#
# In a step all queries meet half the keys or half the queries all keys, whichever the rank; slices are made contiguous
# for the kernel. What is kept for the backward is not in these numbers.


@dataclass(frozen=True)
class RingSizes:
    """Sizes on which the bytes of ring attention depend.

    Attributes:
        queries: elements of a rank's queries.
        keys: elements of a rank's keys, and of its values.
        element_bytes: bytes of an element.
        ranks: of the ring.
        scratch: bytes that the kernel's backward allocates for each element of its queries.
        workspace: bytes that the kernel allocates whatever the sizes.
        repeats: whether key/value heads are repeated for the query heads that share them.
    """

    queries: int
    keys: int
    element_bytes: int
    ranks: int
    scratch: int = 0
    workspace: int = 0
    repeats: bool = False

    @property
    def travelling(self) -> int:
        """Bytes of other ranks' keys and values: those in use and those that arrive; with two ranks one set of them."""
        return 2 * self.keys * self.element_bytes * min(2, self.ranks - 1)


def forward_bytes(sizes: RingSizes) -> int:
    """Counts the peak bytes of the forward, without what the backward needs.

    Keys and values as they came, the result in fp32, keys and values on their way, a step's result and what it takes to
    make or merge it. (Queries as they came are where the output will be.)
    """
    queries, keys = sizes.queries * sizes.element_bytes, sizes.keys * sizes.element_bytes
    wide = sizes.queries * FP32
    repeated = queries if _repeats(sizes) else 0  # half the keys and values, for all heads
    cut_queries = queries // 2 + queries // 2 + 2 * repeated + sizes.workspace  # copied, and their result
    cut_keys = keys + queries + repeated + sizes.workspace
    merging = queries + (wide if sizes.element_bytes != FP32 else 0)
    step = max(cut_queries, cut_keys, merging)
    return 2 * keys + wide + sizes.travelling + step


def backward_bytes(sizes: RingSizes) -> int:
    """Counts the peak bytes of the backward, without what the forward kept.

    The output's gradient as it came, contiguous copies of that gradient and of the output, and gradients in fp32. Those
    of keys and values exist twice: as they arrive, and as they are sent or added up. Then what one step allocates.
    """
    queries = sizes.queries * sizes.element_bytes
    step = max(half_the_queries(sizes), half_the_keys(sizes))
    return 3 * queries + sums_bytes(sizes) + sizes.travelling + step


def sums_bytes(sizes: RingSizes) -> int:
    """Counts the bytes of gradients in fp32: of the queries, and twice of keys and values."""
    return FP32 * (sizes.queries + 2 * 2 * sizes.keys)


def half_the_queries(sizes: RingSizes) -> int:
    """Counts the bytes of a step in which half the queries meet all keys.

    Copies of half of gradient, queries and output; their gradients, and those of all keys and values.
    """
    queries, keys = sizes.queries * sizes.element_bytes, sizes.keys * sizes.element_bytes
    repeated = 4 * queries + 2 * (FP32 * sizes.keys - keys) if _repeats(sizes) else 0  # and their gradients, summed
    return 3 * queries // 2 + queries // 2 + 2 * keys + repeated + sizes.scratch * sizes.queries // 2 + sizes.workspace


def half_the_keys(sizes: RingSizes) -> int:
    """Counts the bytes of a step in which all queries meet half the keys.

    Copies of half of keys and values; their gradients, and those of all queries.
    """
    queries, keys = sizes.queries * sizes.element_bytes, sizes.keys * sizes.element_bytes
    repeated = 2 * queries + FP32 * sizes.keys - keys if _repeats(sizes) else 0
    return keys + queries + keys + repeated + sizes.scratch * sizes.queries + sizes.workspace


def _repeats(sizes: RingSizes) -> bool:
    return sizes.repeats and sizes.keys != sizes.queries
