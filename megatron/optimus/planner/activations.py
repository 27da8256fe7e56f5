"""Bytes that one micro-batch needs in a layer, in the embedding and in the head, part by part.

Counted are the tensors that the program's own code creates. For each part: what backward keeps (``saved``), and the
most that its forward and its backward need besides (``forward``, ``backward``), gradients of its weights and of
its output included. What a kernel allocates is that of the device's kernels (``Kernels``).

Letters as in the code: T tokens, D model width, H heads x head width, G key/value heads x head width, F inner width,
E experts, K experts per token, R rows of tokens at the experts of this rank, P rows in expert order, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optimus.config.schema import (
    ContextCommunication,
    Normalization,
    QKNormScope,
    Recompute,
    TokenDispatcherType,
)
from megatron.optimus.planner.parameters import adds_expert_gradients, gradient_bytes
from megatron.optimus.planner.ring import FP32, RingSizes, backward_bytes, forward_bytes
from megatron.optimus.planner.share import Share

INT32, INT64 = 4, 8
LOSS_CHUNK = 2**27  # logits held at once in fp32, layers/loss.py


@dataclass(frozen=True)
class Kernels:
    """What a device's kernels keep and allocate."""

    fused_norm: bool  # RMSNorm keeps its input and one number a token, else also its normalised output
    fused_elementwise: bool  # ops/elementwise.py has kernels, and LayerNorm needs no fp32 copy
    row_tile: int  # rows of an expert start at a multiple of it; what the backward needs is kept without padding
    keeps_order: bool  # the expert kernels keep the order of rows; else the experts' numbers
    counts_workspace: bool = True  # the expert kernels' temporary rows come from torch's allocator
    adds_gradients: bool = True  # the expert kernels can add weight gradients to the optimizer's buffers
    splits_backward: bool = True  # into two halves, of which the second gives the gradient of gate_up alone
    overlaps_collectives: bool = True  # as platform/device.py
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


@dataclass(frozen=True)
class Part:
    """Bytes of a part of the computation; see the top of the file."""

    name: str
    saved: int = 0
    forward: int = 0
    backward: int = 0

    def recomputed(self, kept: int) -> Part:
        """Only ``kept`` bytes wait for the backward, which computes the rest again."""
        dropped = self.saved - kept
        return Part(self.name, kept, dropped + self.forward, dropped + max(self.forward, self.backward))

    def offloaded(self) -> Part:
        """What is saved waits in host memory."""
        return Part(self.name, 0, self.saved + self.forward, self.saved + self.backward)


def layer_parts(
    share: Share, kernels: Kernels, recompute: frozenset[Recompute], *, is_moe: bool, offload: bool
) -> list[Part]:
    """The parts of one layer, in the order of the forward."""
    again = Recompute.MOE in recompute
    if is_moe:
        mlp = _experts(share, kernels, again)
    else:
        mlp = [_mlp("mlp", share, kernels, share.model.ffn_hidden_size, recomputes=again)]
    norms = Recompute.NORM in recompute
    parts = [
        _norm("attention norm", share, kernels, recomputes=norms),
        _attention(share, kernels, recompute),
        _norm("mlp norm", share, kernels, recomputes=norms),
        *mlp,
    ]
    return [part.offloaded() for part in parts] if offload else parts


def _norm(name: str, share: Share, kernels: Kernels, *, recomputes: bool) -> Part:
    """Its input, the residual; its output, which the part behind keeps; statistics."""
    tokens, width, element = share.tokens_outside, share.model.hidden_size, share.element
    stream = tokens * width * element
    if share.model.normalization is Normalization.LAYERNORM_NONPARAMETRIC and kernels.fused_elementwise:
        part = Part(name, 2 * stream + 2 * FP32 * tokens, stream, 2 * stream)
        return part.recomputed(2 * stream) if recomputes else part
    if share.model.normalization is Normalization.LAYERNORM_NONPARAMETRIC:
        wide = tokens * width * FP32
        part = Part(name, wide + 2 * FP32 * tokens + stream, wide, 3 * wide)
        return part.recomputed(2 * stream) if recomputes else part
    normalised = 0 if kernels.fused_norm else stream
    part = Part(name, 2 * stream + normalised + FP32 * tokens, stream, 2 * stream)
    return part.recomputed(2 * stream) if recomputes else part


def _attention(share: Share, kernels: Kernels, recompute: frozenset[Recompute]) -> Part:
    model, layout, element, tokens = share.model, share.layout, share.element, share.tokens
    queries = tokens * model.num_attention_heads * model.head_dim // layout.tp
    keys = tokens * model.num_kv_heads * model.head_dim // layout.tp
    head_tokens = tokens * model.num_attention_heads // layout.tp
    normed = queries + keys
    norm = 0
    if model.qk_layernorm:
        per_head = model.qk_layernorm_scope is QKNormScope.HEAD
        statistics = (head_tokens + tokens * model.num_kv_heads // layout.tp if per_head else 2 * tokens) * FP32
        norm = normed * element + statistics
        if not per_head and layout.tp > 1:  # TensorParallelRMSNorm: fp32 before and after
            norm = normed * 2 * FP32 + statistics
        elif not kernels.fused_norm:
            norm += normed * element
        if Recompute.NORM in recompute and Recompute.ATTENTION not in recompute:
            norm = normed * element
    if model.clip_qkv is not None:
        norm += (queries + 2 * keys) * element
    core = head_tokens * FP32 + (queries + 2 * keys + queries) * element
    if layout.cp > 1 and share.config.parallel.cp_comm_type is ContextCommunication.A2A:
        per_rank = model.num_kv_heads // layout.tp
        repeats = math.lcm(per_rank, layout.cp) // per_rank
        core += (2 * keys * (repeats - 1) + queries) * element  # the output a second time, in its own positions
    gathered = tokens * model.hidden_size * element if layout.tp > 1 else 0
    outside = share.tokens_outside * model.hidden_size * element
    # Of RoPE: fp32 copies, or its result beside what it has read, which lives to the end of the forward by name.
    rope = max(queries, keys) * element if kernels.fused_elementwise else 4 * max(queries, keys) * FP32
    read = (queries + keys) * element if kernels.fused_elementwise else rope + queries * element
    weights = (2 * queries + 2 * keys) // tokens * model.hidden_size * element
    gradients = (3 * queries + 2 * keys) * element + outside
    forward = max(gathered + read, _leaving(share))
    backward = gathered + gradients + max(rope, weights)
    if layout.cp > 1 and share.config.parallel.cp_comm_type is ContextCommunication.P2P:
        ring = ring_sizes(share, kernels)
        # What RoPE has read lives to the end of the forward, by name; with norms it is kept for the backward anyway.
        read = 0 if model.qk_layernorm else (queries + keys) * element
        forward = max(forward, read + forward_bytes(ring))
        output_weight = queries // tokens * model.hidden_size * element  # its gradient has just been computed
        backward = max(backward, outside + output_weight + backward_bytes(ring))
    part = Part("attention", norm + core, forward, backward)
    if Recompute.ATTENTION in recompute:
        # What came from other ranks is not asked for again.
        kept = gathered if share.config.parallel.sequence_parallel else 0
        if layout.cp > 1 and share.config.parallel.cp_comm_type is ContextCommunication.A2A:
            kept += (2 * queries + 2 * keys) * element
        elif layout.cp > 1:
            kept += queries * element + head_tokens * FP32
        part = part.recomputed(kept)
    return part


def ring_sizes(share: Share, kernels: Kernels) -> RingSizes:
    """Of ring attention on this rank."""
    model, layout, tokens = share.model, share.layout, share.tokens
    heads, groups = model.num_attention_heads // layout.tp, model.num_kv_heads // layout.tp
    scratch, repeats = kernels.ring_scratch, kernels.ring_repeats
    if share.config.training.deterministic and kernels.multiprocessors:
        # Contiguous copies of gradient and output; a sum for each group of blocks that work on the same head; gradients
        # of keys and values for every query head.
        scratch = 2 * share.element + FP32 * -(-kernels.multiprocessors // (share.sequences * heads))
        repeats = True
    queries, keys = (tokens * number * model.head_dim for number in (heads, groups))
    return RingSizes(queries, keys, share.element, layout.cp, scratch, kernels.ring_workspace, repeats)


def _leaving(share: Share) -> int:
    """What it takes to sum a split layer's results over the tensor-parallel ranks: partial sums and result. In blocks
    (--tp-comm-overlap) also those of the other ranks' tokens, which are all on their way when the last one is made."""
    tp, stream = share.layout.tp, share.tokens * share.model.hidden_size * share.element
    outside = share.tokens_outside * share.model.hidden_size * share.element
    partial = stream if tp > 1 else 0
    in_blocks = share.config.parallel.tp_comm_overlap
    return partial + outside + (partial * (tp - 1) // tp if in_blocks else 0)


def _mlp(name: str, share: Share, kernels: Kernels, width: int, *, recomputes: bool) -> Part:
    """gate, up, silu(gate) unless its product with up is one kernel, and that product. ``width``: the inner one."""
    layout, element, tokens = share.layout, share.element, share.tokens
    inner = tokens * width // layout.tp * element
    gathered = tokens * share.model.hidden_size * element if layout.tp > 1 else 0
    outside = share.tokens_outside * share.model.hidden_size * element
    weights = 2 * (inner // tokens) * share.model.hidden_size
    saved = (3 if kernels.fused_elementwise else 4) * inner
    part = Part(name, saved, _leaving(share), gathered + outside + 2 * inner + max(inner, weights))
    if recomputes:
        part = part.recomputed(gathered if share.config.parallel.sequence_parallel else 0)
    return part


def _shared_experts(share: Share, kernels: Kernels, gathered: int, *, recomputes: bool) -> Part:
    """The MLP, and what the gate's product keeps; beside it lie the ``gathered`` rows of the routed experts, in the
    backward their gradients, and the gradient of the layer's input."""
    model, tokens, element = share.model, share.tokens_outside, share.element
    stream = tokens * model.hidden_size * element
    part = _mlp("shared experts", share, kernels, model.moe_shared_expert_intermediate_size, recomputes=recomputes)
    gate = stream + tokens * element if model.moe_shared_expert_gate else 0
    return Part(part.name, part.saved + gate, part.forward + gathered, part.backward + gathered + stream)


def rows_in_expert_order(share: Share, kernels: Kernels) -> int:
    """P: room for every choice of every row, whichever experts are chosen."""
    slots, local = share.rows * share.model.moe_router_topk, share.model.num_experts // share.layout.ep
    if kernels.row_tile == 1:
        return slots
    return (slots // kernels.row_tile + min(local, slots)) * kernels.row_tile + kernels.row_tile


def _experts(share: Share, kernels: Kernels, recomputes: bool) -> list[Part]:
    """Router, exchange of tokens, shared experts beside it, and experts."""
    model, element = share.model, share.element
    tokens, rows, topk = share.tokens_outside, share.rows, model.moe_router_topk
    stream = tokens * model.hidden_size * element
    exchanges = share.expert_ranks > 1
    scores = tokens * model.num_experts * FP32
    numbers = tokens * topk * INT64
    gathered = rows * model.hidden_size * element if exchanges else 0
    # With all-gather the tokens' arrival is under way while the router works.
    early = gathered if share.config.parallel.moe_token_dispatcher_type is TokenDispatcherType.ALLGATHER else 0
    router = Part("router", 2 * scores + numbers + 4 * tokens * FP32, stream * FP32 // element + early, 3 * stream)
    sent = 0
    if exchanges and share.config.parallel.moe_token_dispatcher_type is TokenDispatcherType.ALLTOALL:
        sent = tokens * share.expert_ranks * INT32  # where the copies of each token are among the rows sent
    if exchanges and share.config.parallel.moe_token_dispatcher_type is TokenDispatcherType.SYMMETRIC:
        sent = rows * (1 + (0 if recomputes else topk * INT32))  # whether it is needed, and its experts here
    exchange = Part("exchange", sent, gathered, gathered + stream)
    experts = _expert_products(share, kernels, rows)
    kept = gathered + rows * topk * FP32  # the rows and their weights
    indices = 0 if kernels.keeps_order else rows * topk * INT32 * int(exchanges)
    experts = Part("experts", kept + indices + experts.saved, experts.forward, experts.backward + gathered + stream)
    if recomputes:
        arguments = kept + rows * topk * INT32 * int(exchanges)
        experts = experts.recomputed(arguments)
    if not model.moe_shared_expert_intermediate_size:
        return [router, exchange, experts]
    shared = _shared_experts(share, kernels, gathered, recomputes=recomputes)
    # The shared experts' result waits for that of the routed ones.
    waiting = 0 if model.moe_shared_expert_gate else stream
    return [router, exchange, shared, Part(experts.name, experts.saved, experts.forward + waiting, experts.backward)]


def _expert_products(share: Share, kernels: Kernels, rows: int) -> Part:
    """csrc/cuda/moe_mlp.cpp: hidden [T K, 2F] waits; rows, activation and their gradients do not."""
    model, element = share.model, share.element
    local = model.num_experts // share.layout.ep
    order, inner = rows_in_expert_order(share, kernels), model.moe_ffn_hidden_size // share.layout.etp
    slots = rows * model.moe_router_topk
    wide, narrow = order * model.hidden_size * element, order * inner * element
    hidden = 2 * slots * inner * element
    index = (order + slots) * INT32 + order // kernels.row_tile * INT32 if kernels.keeps_order else 0
    weights = 3 * local * inner * model.hidden_size * element
    if kernels.adds_gradients and adds_expert_gradients(share):  # 16-bit buffers are added to from fp32
        weights = 0 if gradient_bytes(share)[0] == FP32 else weights * FP32 // element
    rows_in = rows * model.hidden_size * element
    if not kernels.counts_workspace:
        return Part("experts", hidden, rows_in, rows_in + weights)
    backward = 3 * wide + 3 * narrow + order * FP32 + rows_in + weights
    return Part("experts", hidden + index, wide + narrow + rows_in, backward)


def _keeps_16_bits(share: Share, kernels: Kernels) -> bool:
    """Logits are never brought to fp32."""
    return kernels.fused_elementwise and share.element == 2


def loss_chunk(share: Share, kernels: Kernels) -> int:
    """Logits held at once."""
    return LOSS_CHUNK * (2 if _keeps_16_bits(share, kernels) else 1)


def head_parts(share: Share, kernels: Kernels) -> list[Part]:
    """Final norm, and output projection with loss, which makes its gradients in the forward (layers/loss.py)."""
    model, element, tokens = share.model, share.element, share.tokens
    outside = share.tokens_outside * model.hidden_size * element
    norm = _norm("final norm", share, kernels, recomputes=False)
    norm = Part(norm.name, norm.saved - outside, norm.forward, norm.backward)  # the loss does not keep its output
    stream = tokens * model.hidden_size * element
    vocabulary = model.vocab_size // share.layout.tp
    weight = vocabulary * model.hidden_size
    rows = max(1, loss_chunk(share, kernels) // vocabulary)
    first, second = (min(rows, max(0, tokens - start)) * vocabulary for start in (0, rows))
    # In fp32 twice at once (exponentials), or beside gradients and a part of the weight's. While the second chunk's
    # logits are made and brought to fp32, those of the first and their gradients are still there.
    logits = max(2 * first * FP32, first * (FP32 + element) + weight * element)
    if second:
        logits = max(logits, (first + second) * (FP32 + element))
    if _keeps_16_bits(share, kernels):
        logits = (first + second) * element  # the weight's gradient is added to by its product
    entered = stream if share.layout.tp > 1 else 0
    saved = stream + weight * FP32
    loss = Part("loss", saved, outside + entered + logits, stream + weight * element)
    return [norm, loss]


def embedding_part(share: Share) -> Part:
    """Nothing but token numbers is kept; the gradient is as large as the table."""
    table = share.model.vocab_size // share.layout.tp * share.model.hidden_size * share.element
    return Part("embedding", 0, share.tokens * share.model.hidden_size * share.element, table)
