"""Floating-point operations of training, counted from the shape of the model."""

from __future__ import annotations

from megatron.optimus.config.schema import ModelConfig


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """FLOPs that one token costs in training, forward and backward.

    Counted are the multiply-adds of matrix products that the mathematics needs, per token of a sequence of length S:

        layer  = D·H·d (q) + 2·D·G·d (k, v) + H·d·D (o)       H query heads, G key/value heads of width d
               + 2 · S/2 · H·d                                 causal QK^T and PV: half of the S keys on average
               + 3·D·F_dense  or  D·E + K·3·D·F + 3·D·F_shared    dense MLP, or router, K of E experts, shared
                                                                  experts (+ D with a gate)
        total  = sum of layers + D·V                           V: output projection; the embedding is a look-up
        FLOPs  = 2 · total · 3                                 2 per multiply-add; backward costs twice the forward

    Norms, RoPE, softmax and everything computed a second time (recomputation, padding) are not counted.
    """
    width, head_width = model.hidden_size, model.num_attention_heads * model.head_dim
    projections = 2 * width * head_width + 2 * width * model.num_kv_heads * model.head_dim
    attention = seq_length * head_width
    experts = width * model.num_experts + model.moe_router_topk * 3 * width * model.moe_ffn_hidden_size
    experts += width * (3 * model.moe_shared_expert_intermediate_size + model.moe_shared_expert_gate)
    moe_layers = len(model.moe_layers)
    mlps = moe_layers * experts + (model.num_layers - moe_layers) * 3 * width * model.ffn_hidden_size
    multiply_adds = model.num_layers * (projections + attention) + mlps + width * model.vocab_size
    return 6.0 * multiply_adds


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: counted FLOP/s over the device's dense peak (arXiv 2204.02311, appendix B).

    None where the peak is unknown (``runtime.device.peak_flops``).
    """
    return None if peak_flops is None else tokens_per_second_per_device * flops_per_token / peak_flops
