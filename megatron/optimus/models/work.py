"""Declares what a rank computes in a layer and in the head: operations, and bytes through memory.

Written without torch, so that the planner can read it on any machine. Matrix products are counted in FLOPs
(config/costs.py), and a backward as two forwards. Bytes are those of the operations between products: each tensor as
often as the program reads and writes it. Traffic inside of the expert kernels and of attention is not counted; the
rates measured for them include it.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.optimus.config.costs import FP32, OperationCounts, head_cost
from megatron.optimus.config.family import layer_parameters
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import ContextCommunication, Normalization, Recompute
from megatron.optimus.models.activations import CUDA, Kernels, attention_kept, loss_chunk, norm_rotates


class BytesPerElement(NamedTuple):
    """Bytes an element in bf16, forward and backward, counted from the code: passes of 2 bytes, or of 4 for fp32."""

    rope: float
    loss: float  # of a logit, beside the products
    nonparametric: float  # LayerNorm
    gated: float  # silu(gate) * up


# To fp32, halves turned, two products, a sum, back, the same in the backward; to fp32, log-sum-exp, exponential, label,
# mask, back; LayerNorm in fp32; each of the two operations by itself.
PLAIN = BytesPerElement(rope=104, loss=54, nonparametric=44, gated=28)
FUSED = BytesPerElement(rope=8, loss=6, nonparametric=10, gated=16)  # ops/triton/elementwise.py, and torch's LayerNorm
FUSED_NORM, RESIDUAL = 10, 12  # RMSNorm, with RoPE behind it in the same kernels or without; a sum both ways
TRAINING = 6.0  # FLOPs of a multiply-add of the forward, with those of the backward
FAMILY = 5  # of a byte that a family's attention keeps: written, read, read again, and its gradient written and read
GATE = 20  # of the shared experts' result: read by the gate, times the gate; times the gate and the gradient, twice

# fp32 passes over a router's logits, forward and both ways. Kernels write logits and scores and read them for the
# losses; in the backward they do so once more, beside gradients in three 16-bit parts. Torch has some forty operations.
LOGIT_PASSES, FUSED_LOGIT_PASSES = (10, 20), (4, 16)
ROUTER_PASSES = 6  # of the tokens: read; read for the weight's gradient, own gradient written, read twice and summed

# Ring attention, bytes of an element of the queries and of the keys (of which there are as many values), both passes.
# A step: results to fp32 and merged (18), gradients added (10); halves made contiguous (8), gradients added (10). Once:
# results and gradients copied into the sums and brought to bf16 (24), output and gradient made contiguous (8); keys and
# values stacked (8), their gradients copied and brought to bf16 (24).
RING_STEP, RING_ONCE = (28, 18), (32, 32)
# Where the ring has no kernel (layers/partial_attention.py, _attend_plain): products in fp32, two forward and five
# backward, whose scores go through memory: 56 bytes of each in the forward (product, scaled, log-sum-exp, exponential),
# 72 in the backward.
SCORE_PRODUCTS, SCORE_BYTES = 7, 128


def bytes_per_element(kernels: Kernels) -> BytesPerElement:
    """Bytes an element that the operations between products move with these kernels."""
    return FUSED if kernels.fused_elementwise else PLAIN


def norm_bytes(rank: RankPlan, kernels: Kernels) -> float:
    """Bytes an element that a norm of the residual stream moves, in bf16."""
    is_parametric = rank.model.normalization is not Normalization.LAYERNORM_NONPARAMETRIC
    return FUSED_NORM if is_parametric else bytes_per_element(kernels).nonparametric


def layer_work(
    rank: RankPlan, recompute: frozenset[Recompute], kernels: Kernels = CUDA, *, is_moe: bool
) -> OperationCounts:
    """Counts forward and backward of one layer for one micro-batch."""
    model, tp, tokens, outside = rank.model, rank.layout.tp, rank.tokens, rank.sequence_parallel_tokens
    width, scale = model.hidden_size, rank.element_bytes / 2
    norms = OperationCounts(memory_bytes=2 * norm_bytes(rank, kernels) * scale * outside * width)
    residuals = OperationCounts(memory_bytes=2 * RESIDUAL * scale * outside * width)
    inner = rank.queries + rank.keys
    qk_norm = OperationCounts(memory_bytes=FUSED_NORM * scale * inner if model.qk_layernorm else 0.0)
    rope = 0.0 if norm_rotates(rank, kernels) else bytes_per_element(kernels).rope
    is_ring = rank.layout.cp > 1 and rank.config.parallel.cp_comm_type is ContextCommunication.P2P
    core = _plain_ring(rank) if is_ring and kernels.ring_workspace else None
    cost = rank.layer_costs[is_moe]
    core = core or OperationCounts(attention=TRAINING * tokens * cost.attention / tp)
    attention = core + OperationCounts(
        gemm_flops=TRAINING * tokens * cost.projections / tp,
        memory_bytes=rope * inner + FAMILY * attention_kept(rank),
    )
    if is_moe:
        mlp = OperationCounts(experts=TRAINING * outside * cost.experts)
        mlp += chunk_work(rank) * (rank.config.parallel.moe_dispatch_chunks - 1)
        mlp += shared_work(rank, kernels)
    else:
        mlp = _mlp_work(rank, kernels, is_moe=False)
    total = norms + residuals + qk_norm + attention + mlp + OperationCounts(layers=2.0)
    if is_moe:
        total += router_training_work(rank, kernels)  # it is not recomputed
    again = OperationCounts()
    for chosen, part in ((Recompute.MOE, mlp), (Recompute.ATTENTION, attention + qk_norm), (Recompute.NORM, norms)):
        if chosen in recompute:
            again += part * (1 / 3)
    if is_ring:
        total += OperationCounts(memory_bytes=ring_traffic(rank.queries, rank.keys, rank.layout.cp) * scale)
        if Recompute.ATTENTION in recompute:  # the ring's result is kept
            again += core * (-1 / 3)
    return total + again + (OperationCounts(layers=0.5) if recompute else OperationCounts())


def _plain_ring(rank: RankPlan) -> OperationCounts:
    """One layer's ring attention without a kernel. A rank's own block is whole, what the causal mask hides included."""
    model, ranks = rank.model, rank.layout.cp
    scores = rank.tokens * (rank.config.training.seq_length / ranks) * (ranks + 1) / 2
    scores *= model.num_attention_heads / rank.layout.tp
    return OperationCounts(memory_bytes=SCORE_BYTES * scores, wide=SCORE_PRODUCTS * 2.0 * model.head_dim * scores)


def chunk_work(rank: RankPlan) -> OperationCounts:
    """What each further chunk of the tokens (--moe-dispatch-chunks) costs a layer.

    Kernels of the experts are launched once more, read the weights once more in either direction, and add to their
    gradients once more.
    """
    experts = [spec.numel for spec in layer_parameters(rank.model, is_moe=True).values() if spec.is_expert]
    weights = sum(experts) // rank.expert_ranks
    return OperationCounts(
        memory_bytes=weights * (2 * rank.element_bytes + 2 * rank.gradient_element_bytes), layers=1.0
    )


def _mlp_work(rank: RankPlan, kernels: Kernels, *, is_moe: bool) -> OperationCounts:
    """The MLP of a dense layer, or of shared experts."""
    model, tokens = rank.model, rank.tokens / rank.layout.tp
    inner = model.moe_shared_expert_intermediate_size if is_moe else model.ffn_hidden_size
    traffic = bytes_per_element(kernels).gated * rank.element_bytes / 2 * tokens * inner
    return OperationCounts(gemm_flops=TRAINING * tokens * rank.layer_costs[is_moe].mlp, memory_bytes=traffic)


def shared_work(rank: RankPlan, kernels: Kernels = CUDA) -> OperationCounts:
    """Counts forward and backward of a layer's shared experts for one micro-batch, and the sum with the routed."""
    model, stream = rank.model, rank.element_bytes / 2 * rank.sequence_parallel_tokens * rank.model.hidden_size
    if not model.moe_shared_expert_intermediate_size:
        return OperationCounts()
    together = RESIDUAL + (GATE if model.moe_shared_expert_gate else 0)
    return _mlp_work(rank, kernels, is_moe=True) + OperationCounts(memory_bytes=together * stream)


def last_product_work(rank: RankPlan) -> OperationCounts:
    """Counts the last product of a layer's experts' backward, beside which their gradients travel."""
    return OperationCounts(experts=TRAINING * rank.sequence_parallel_tokens * rank.layer_costs[True].experts * 2 / 9)


def router_work(rank: RankPlan, kernels: Kernels = CUDA) -> OperationCounts:
    """Counts a router's forward for one micro-batch, beside which all-gather brings tokens.

    Tokens are read once by the product, or brought to fp32 for it.
    """
    model, tokens = rank.model, rank.sequence_parallel_tokens
    if model.num_experts > kernels.router_experts:
        width = model.hidden_size * (rank.element_bytes + 2 * FP32)
        return OperationCounts(memory_bytes=tokens * (width + LOGIT_PASSES[0] * model.num_experts * FP32))
    width = model.hidden_size * rank.element_bytes
    return OperationCounts(
        gemm_flops=2.0 * tokens * model.hidden_size * model.num_experts,
        memory_bytes=tokens * (width + FUSED_LOGIT_PASSES[0] * model.num_experts * FP32),
    )


def router_training_work(rank: RankPlan, kernels: Kernels = CUDA) -> OperationCounts:
    """Counts forward and backward of a router for one micro-batch.

    With fused kernels (ops/triton/router_linear.py) tokens are read in either direction, and their gradient is written
    and added to the experts'; the backward's products are three each, of parts of the logits' gradient. Without, both
    directions have fp32 copies of the tokens, and products in fp32.
    """
    model, tokens = rank.model, rank.sequence_parallel_tokens
    cost = tokens * model.hidden_size * model.num_experts
    if not kernels.fused_elementwise:
        return router_work(rank, kernels) * 3 + OperationCounts(wide=TRAINING * cost)
    each = FUSED_LOGIT_PASSES if model.num_experts <= kernels.router_experts else LOGIT_PASSES
    logits = each[1] * model.num_experts * FP32
    return OperationCounts(
        gemm_flops=(2 + 3 * 4) * cost,
        memory_bytes=tokens * (model.hidden_size * ROUTER_PASSES * rank.element_bytes + logits),
    )


def ring_traffic(queries: float, keys: float, ranks: int) -> float:
    """Counts the bytes through memory beside ring attention's kernels, in bf16. ``queries``, ``keys``: elements."""
    each = [once + (ranks - 1) * step for once, step in zip(RING_ONCE, RING_STEP, strict=True)]
    return each[0] * queries + each[1] * keys


def head_work(rank: RankPlan, kernels: Kernels = CUDA) -> OperationCounts:
    """Counts final norm, output projection and loss for one micro-batch."""
    model, tp, tokens = rank.model, rank.layout.tp, rank.tokens
    vocabulary = model.vocab_size / tp
    chunks = max(1.0, tokens * vocabulary / loss_chunk(rank, kernels))
    logits = bytes_per_element(kernels).loss * vocabulary * tokens
    weight = chunks * (2 * FP32 + 2) * vocabulary * model.hidden_size
    traffic = logits + weight + norm_bytes(rank, kernels) * tokens * model.hidden_size
    return OperationCounts(gemm_flops=TRAINING * tokens * head_cost(model) / tp, memory_bytes=traffic, layers=1.0)
