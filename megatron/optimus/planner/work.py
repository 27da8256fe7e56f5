"""What a rank computes in one optimizer step: operations by the unit that does them, and bytes through memory.

Matrix products are counted as the mathematics has them (config/layer_costs.py), but for those of routers, whose time is
that of their bytes; backward is twice the forward. Bytes are those of the operations between the products, each tensor
read and written as often as the program's own code does it; what happens inside of the expert kernels and of attention
is in the rates measured for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.optimus.config.layer_costs import LayerCost, head_cost, layer_cost
from megatron.optimus.config.schema import ContextCommunication, Normalization, OptimizerName, Recompute
from megatron.optimus.planner.activations import CUDA, Kernels, layer_parts, loss_chunk
from megatron.optimus.planner.parameters import adds_expert_gradients, families, gradient_bytes, parameters
from megatron.optimus.planner.ring import FP32
from megatron.optimus.planner.share import Share


class Passes(NamedTuple):
    """Bytes an element in bf16, forward and backward, counted from the code: passes of 2 bytes, or of 4 for fp32."""

    rope: float
    loss: float  # of a logit, beside the products
    nonparametric: float  # LayerNorm
    gated: float  # silu(gate) * up


# To fp32, halves turned, two products, a sum, back, the same in the backward; to fp32, log-sum-exp, exponential, label,
# mask, back; LayerNorm in fp32; each of the two operations by itself.
PLAIN = Passes(rope=104, loss=54, nonparametric=44, gated=28)
FUSED = Passes(rope=8, loss=6, nonparametric=10, gated=16)  # ops/triton/elementwise.py, and torch's LayerNorm
FUSED_NORM, RESIDUAL = 10, 12  # RMSNorm; a sum both ways
TRAINING = 6.0  # FLOPs of a multiply-add of the forward, with those of the backward
GATE = 20  # of the shared experts' result: read by the gate, times the gate; times the gate and the gradient, twice

# Ring attention, bytes of an element of the queries and of the keys (of which there are as many values), both passes.
# A step: results to fp32 and merged (18), gradients added (10); halves made contiguous (8), gradients added (10). Once:
# results and gradients copied into the sums and brought to bf16 (24), output and gradient made contiguous (8); keys and
# values stacked (8), their gradients copied and brought to bf16 (24).
RING_STEP, RING_ONCE = (28, 18), (32, 32)
# Where the ring has no kernel (layers/partial_attention.py, _attend_plain): products in fp32, two forward and five
# backward, whose scores go through memory: 56 bytes of each in the forward (product, scaled, log-sum-exp, exponential),
# 72 in the backward.
SCORE_PRODUCTS, SCORE_BYTES = 7, 128


def passes(kernels: Kernels) -> Passes:
    return FUSED if kernels.fused_elementwise else PLAIN


@dataclass(frozen=True)
class Work:
    """Operations and bytes."""

    products: float = 0.0  # FLOPs of dense matrix products
    attention: float = 0.0
    experts: float = 0.0  # of the grouped products
    traffic: float = 0.0  # bytes
    layers: float = 0.0  # passes through a layer, forward or backward, that the host has to launch
    host: float = 0.0  # bytes to host memory and back
    wide: float = 0.0  # FLOPs of products in fp32

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in Work.__dataclass_fields__))

    def __mul__(self, factor: float) -> Work:
        return Work(*(getattr(self, name) * factor for name in Work.__dataclass_fields__))


def cost_of_layer(share: Share, *, is_moe: bool) -> LayerCost:
    return layer_cost(share.model, share.config.training.seq_length, is_moe=is_moe)


def layer_work(share: Share, recompute: frozenset[Recompute], kernels: Kernels = CUDA, *, is_moe: bool) -> Work:
    """Forward and backward of one layer for one micro-batch."""
    model, tp, tokens, outside = share.model, share.layout.tp, share.tokens, share.tokens_outside
    width, scale = model.hidden_size, share.element / 2
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.num_kv_heads * model.head_dim // tp
    norm = passes(kernels).nonparametric if model.normalization is Normalization.LAYERNORM_NONPARAMETRIC else FUSED_NORM
    norms = Work(traffic=2 * norm * scale * outside * width)
    residuals = Work(traffic=2 * RESIDUAL * scale * outside * width)
    inner = (queries + keys) * tokens
    qk_norm = Work(traffic=FUSED_NORM * scale * inner if model.qk_layernorm else 0.0)
    is_ring = share.layout.cp > 1 and share.config.parallel.cp_comm_type is ContextCommunication.P2P
    core = _plain_ring(share) if is_ring and kernels.ring_workspace else None
    cost = cost_of_layer(share, is_moe=is_moe)
    core = core or Work(attention=TRAINING * tokens * cost.attention / tp)
    attention = core + Work(
        products=TRAINING * tokens * cost.projections / tp,
        traffic=passes(kernels).rope * inner,
    )
    if is_moe:
        mlp = Work(experts=TRAINING * outside * cost.experts)
        mlp += part_work(share) * (share.config.parallel.moe_dispatch_chunks - 1)
        mlp += shared_work(share, kernels)
    else:
        mlp = _mlp_work(share, kernels, is_moe=False)
    total = norms + residuals + qk_norm + attention + mlp + Work(layers=2.0)
    again = Work()
    for chosen, part in ((Recompute.MOE, mlp), (Recompute.ATTENTION, attention + qk_norm), (Recompute.NORM, norms)):
        if chosen in recompute:
            again += part * (1 / 3)
    if is_ring:
        total += Work(traffic=ring_traffic(tokens * queries, tokens * keys, share.layout.cp) * scale)
        if Recompute.ATTENTION in recompute:  # the ring's result is kept
            again += core * (-1 / 3)
    return total + again + (Work(layers=0.5) if recompute else Work())


def _plain_ring(share: Share) -> Work:
    """One layer's attention without a kernel. A rank's own block is whole, what the causal mask hides included."""
    model, ranks = share.model, share.layout.cp
    scores = share.tokens * (share.config.training.seq_length / ranks) * (ranks + 1) / 2
    scores *= model.num_attention_heads / share.layout.tp
    return Work(traffic=SCORE_BYTES * scores, wide=SCORE_PRODUCTS * 2.0 * model.head_dim * scores)


def part_work(share: Share) -> Work:
    """What each further part of the tokens (--moe-dispatch-chunks) costs a layer: kernels of the experts are launched
    once more, read the weights once more in either direction, and add to their gradients once more."""
    weights = sum(one.numel for one, _ in parameters(share).items() if one.is_expert)
    return Work(traffic=weights * (2 * share.element + 2 * gradient_bytes(share)[0]), layers=1.0)


def _mlp_work(share: Share, kernels: Kernels, *, is_moe: bool) -> Work:
    """Of a dense layer, or of shared experts."""
    model, tokens = share.model, share.tokens / share.layout.tp
    inner = model.moe_shared_expert_intermediate_size if is_moe else model.ffn_hidden_size
    traffic = passes(kernels).gated * share.element / 2 * tokens * inner
    return Work(products=TRAINING * tokens * cost_of_layer(share, is_moe=is_moe).mlp, traffic=traffic)


def shared_work(share: Share, kernels: Kernels = CUDA) -> Work:
    """Forward and backward of one layer's shared experts for one micro-batch, and the sum with the routed ones."""
    model, stream = share.model, share.element / 2 * share.tokens_outside * share.model.hidden_size
    if not model.moe_shared_expert_intermediate_size:
        return Work()
    together = RESIDUAL + (GATE if model.moe_shared_expert_gate else 0)
    return _mlp_work(share, kernels, is_moe=True) + Work(traffic=together * stream)


def last_product_work(share: Share) -> Work:
    """Of one layer and micro-batch: the last product of the experts' backward, beside which their gradients travel."""
    return Work(experts=TRAINING * share.tokens_outside * cost_of_layer(share, is_moe=True).experts * 2 / 9)


def router_work(share: Share) -> Work:
    """Of one layer and micro-batch: the router's forward, beside which all-gather brings tokens. x to fp32, read by the
    product; logits read and written about ten times for scores, choices and losses."""
    model, tokens = share.model, share.tokens_outside
    return Work(traffic=tokens * (model.hidden_size * (share.element + 2 * FP32) + 10 * model.num_experts * FP32))


def ring_traffic(queries: float, keys: float, ranks: int) -> float:
    """Bytes through memory beside the kernels of ring attention, in bf16: ``queries`` and ``keys`` are elements."""
    each = [once + (ranks - 1) * step for once, step in zip(RING_ONCE, RING_STEP, strict=True)]
    return each[0] * queries + each[1] * keys


def head_work(share: Share, kernels: Kernels = CUDA) -> Work:
    """Final norm, output projection and loss for one micro-batch."""
    model, tp, tokens = share.model, share.layout.tp, share.tokens
    vocabulary = model.vocab_size / tp
    norm = passes(kernels).nonparametric if model.normalization is Normalization.LAYERNORM_NONPARAMETRIC else FUSED_NORM
    chunks = max(1.0, tokens * vocabulary / loss_chunk(share, kernels))
    traffic = passes(kernels).loss * vocabulary * tokens + chunks * (2 * FP32 + 2) * vocabulary * model.hidden_size
    traffic += norm * tokens * model.hidden_size
    return Work(products=TRAINING * tokens * head_cost(model) / tp, traffic=traffic, layers=1.0)


def gradient_work(share: Share, kernels: Kernels) -> Work:
    """Gradients of one micro-batch from where backward leaves them to where they add up."""
    kept, _ = gradient_bytes(share)
    again = (share.micro_batches - 1) / share.micro_batches  # all but the first read what is there
    traffic = 0.0
    for parameter, count in parameters(share).items():
        if parameter.is_expert and kernels.adds_gradients and adds_expert_gradients(share):
            per_element = 3.0 * kept - share.element  # cleared, read and written, where a gradient apart was written
        else:
            per_element = share.element + kept * (1 + again)
        traffic += parameter.numel * count * per_element
    return Work(traffic=traffic)


def update_work(share: Share) -> Work:
    """The optimizer: norm and update of this rank's shards, once a step."""
    kept, sent = gradient_bytes(share)
    total = Work()
    for family in families(share):
        moments = 2 if share.config.optimizer.optimizer is OptimizerName.ADAM else 1
        width = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256}[share.config.optimizer.optimizer_state_dtype.value]
        per_element = 2 * max(kept, sent) + 2 * FP32 + share.element + 2 * moments * width
        total += Work(traffic=per_element * family.shard)
        if family.is_matrix:
            side = min(share.model.hidden_size, share.model.moe_ffn_hidden_size or share.model.ffn_hidden_size)
            steps = share.config.optimizer.muon_num_ns_steps
            total += Work(products=steps * 6.0 * side * family.shard, traffic=steps * 12.0 * family.shard)
    return total


def micro_batch_work(share: Share, kernels: Kernels = CUDA) -> Work:
    """All that a rank does for one micro-batch."""
    parallel = share.config.parallel
    chosen = frozenset(parallel.recompute_modules)
    limit = share.num_layers if parallel.recompute_num_layers is None else parallel.recompute_num_layers
    total = Work()
    for is_moe in sorted({kind for chunk in share.kinds for kind in chunk}):
        count = sum(chunk.count(is_moe) for chunk in share.kinds)
        recomputing = sum(chunk[:limit].count(is_moe) for chunk in share.kinds)
        total += layer_work(share, frozenset(), kernels, is_moe=is_moe) * (count - recomputing)
        total += layer_work(share, chosen, kernels, is_moe=is_moe) * recomputing
        offloaded = sum(chunk[: parallel.cpu_offloading_num_layers].count(is_moe) for chunk in share.kinds)
        if offloaded:
            again = chosen if limit else frozenset()
            parts = layer_parts(share, kernels, again, is_moe=is_moe, offload=False)
            total += Work(host=2.0 * sum(part.saved for part in parts) * offloaded)
    if share.has_head:
        total += head_work(share, kernels)
    return total + gradient_work(share, kernels)
