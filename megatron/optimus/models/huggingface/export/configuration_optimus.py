# SPDX-License-Identifier: Apache-2.0
"""Configuration of a decoder-only language model that Optimus has trained. Loaded with ``trust_remote_code=True``."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class OptimusConfig(PretrainedConfig):
    """Shape of the model; fields that transformers does not have elsewhere carry the names of Optimus's options.

    Args:
        head_dim: width of an attention head; None: hidden_size / num_attention_heads.
        intermediate_size: inner width of the MLP in layers without experts.
        rms_norm_eps: added to the variance in every norm.
        rope_parameters: ``rope_type`` ("default", "linear" or "llama3"), ``rope_theta``, and what the type needs.
        normalization: of the residual stream, "rmsnorm" or "layernorm-nonparametric" (without scale and shift).
        qk_layernorm: RMSNorm of queries and keys before RoPE.
        qk_layernorm_scope: "full": over all heads together; "head": over each head.
        clip_qkv: queries, keys and values are clamped to [-x, x]; None: they are not.
        add_qkv_bias: biases in the projections of queries, keys and values.
        num_experts: routed experts of a layer; 0: a dense model.
        mlp_only_layers: numbers of the layers that have a dense MLP in place of experts.
        moe_intermediate_size: inner width of one routed expert.
        num_experts_per_tok: routed experts of a token.
        norm_topk_prob: the weights of a token's experts are divided by their sum.
        moe_router_score_function: "softmax" or "sigmoid" of the router's logits.
        moe_router_enable_expert_bias: a bias of each expert is added to the scores for the choice alone.
        moe_shared_expert_intermediate_size: inner width of the experts that every token passes; 0: there are none.
        moe_shared_expert_gate: their output is multiplied by a sigmoid gate.
    """

    model_type = "optimus"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 2048,
        intermediate_size: int = 8192,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 4096,
        rms_norm_eps: float = 1e-5,
        rope_parameters: dict[str, Any] | None = None,
        normalization: str = "rmsnorm",
        qk_layernorm: bool = True,
        qk_layernorm_scope: str = "full",
        clip_qkv: float | None = None,
        add_qkv_bias: bool = False,
        num_experts: int = 0,
        mlp_only_layers: list[int] | None = None,
        moe_intermediate_size: int = 1024,
        num_experts_per_tok: int = 8,
        norm_topk_prob: bool = False,
        moe_router_score_function: str = "softmax",
        moe_router_enable_expert_bias: bool = False,
        moe_shared_expert_intermediate_size: int = 0,
        moe_shared_expert_gate: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.normalization = normalization
        self.qk_layernorm = qk_layernorm
        self.qk_layernorm_scope = qk_layernorm_scope
        self.clip_qkv = clip_qkv
        self.add_qkv_bias = add_qkv_bias
        self.num_experts = num_experts
        self.mlp_only_layers = mlp_only_layers or []
        self.moe_intermediate_size = moe_intermediate_size
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.moe_router_score_function = moe_router_score_function
        self.moe_router_enable_expert_bias = moe_router_enable_expert_bias
        self.moe_shared_expert_intermediate_size = moe_shared_expert_intermediate_size
        self.moe_shared_expert_gate = moe_shared_expert_gate
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
