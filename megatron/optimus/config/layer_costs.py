"""What a token costs in a layer and in the head: the count behind MFU, the planner's operations and the stages' split.

Counted are the multiply-adds of matrix products in one forward that the mathematics needs, per token of a sequence of
length S; H query heads and G key/value heads of width d, D model width, V vocabulary:

    projections = D·H·d (q) + 2·D·G·d (k, v) + H·d·D (o)
    attention   = 2 · S/2 · H·d          causal QK^T and PV: half of the S keys on average
    mlp         = 3·D·F                  dense layer; with experts the shared ones
    router      = D·E                    with a gate of shared experts + D
    experts     = K·3·D·F                the K of E that a token takes
    head        = D·V                    the embedding is a look-up

Norms, RoPE, softmax and everything computed a second time (recomputation, padding) are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.optimus.config.schema import ModelConfig


class LayerCost(NamedTuple):
    """Multiply-adds of a token in one layer's forward."""

    projections: int
    attention: int
    mlp: int
    router: int
    experts: int

    @property
    def total(self) -> int:
        return sum(self)


def layer_cost(model: ModelConfig, seq_length: int, *, is_moe: bool) -> LayerCost:
    """Of a layer with experts or of a dense one."""
    width, head_width = model.hidden_size, model.num_attention_heads * model.head_dim
    projections = 2 * width * head_width + 2 * width * model.num_kv_heads * model.head_dim
    attention = seq_length * head_width
    if not is_moe:
        return LayerCost(projections, attention, mlp=3 * width * model.ffn_hidden_size, router=0, experts=0)
    return LayerCost(
        projections,
        attention,
        mlp=3 * width * model.moe_shared_expert_intermediate_size,
        router=width * (model.num_experts + model.moe_shared_expert_gate),
        experts=model.moe_router_topk * 3 * width * model.moe_ffn_hidden_size,
    )


def head_cost(model: ModelConfig) -> int:
    """Of the output projection."""
    return model.hidden_size * model.vocab_size
