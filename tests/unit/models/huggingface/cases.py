"""Models of every architecture that Hugging Face can express."""

import dataclasses

from megatron.optimus.config.schema import (
    ModelConfig,
    Normalization,
    QKNormScope,
    RotaryScaling,
)

MOE = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=32,
    num_experts=4,
    moe_ffn_hidden_size=12,
    moe_router_topk=2,
    clip_qkv=8.0,
    rotary_base=5000.0,
)
OLMO = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    vocab_size=32,
    normalization=Normalization.LAYERNORM_NONPARAMETRIC,
    qk_layernorm=False,
    untie_embeddings_and_output_weights=False,
)
DENSE_MULA = dataclasses.replace(MOE, num_experts=0)
MIXTRAL = dataclasses.replace(MOE, qk_layernorm=False, moe_router_norm_topk_prob=True, clip_qkv=None, kv_channels=6)
QWEN3_MOE = dataclasses.replace(MOE, qk_layernorm_scope=QKNormScope.HEAD, clip_qkv=None, kv_channels=6)
QWEN2_MOE = dataclasses.replace(
    MOE,
    qk_layernorm=False,
    clip_qkv=None,
    add_qkv_bias=True,
    moe_shared_expert_intermediate_size=20,
    moe_shared_expert_gate=True,
)
GRANITE = dataclasses.replace(
    MIXTRAL, kv_channels=None, moe_shared_expert_intermediate_size=20, rotary_scaling=RotaryScaling.LINEAR
)
LLAMA = dataclasses.replace(
    DENSE_MULA, qk_layernorm=False, clip_qkv=None, kv_channels=6, rotary_scaling=RotaryScaling.LLAMA3
)
QWEN3 = dataclasses.replace(
    DENSE_MULA, qk_layernorm_scope=QKNormScope.HEAD, clip_qkv=None, rotary_scaling=RotaryScaling.LINEAR
)
QWEN2 = dataclasses.replace(DENSE_MULA, qk_layernorm=False, clip_qkv=None, add_qkv_bias=True)
QWEN3_MOE_DENSE_FIRST = dataclasses.replace(QWEN3_MOE, num_layers=4, moe_layer_freq=[0, 1, 0, 1], ffn_hidden_size=28)
QWEN2_MOE_EVERY_SECOND = dataclasses.replace(QWEN2_MOE, num_layers=4, moe_layer_freq=[0, 0, 1, 1], ffn_hidden_size=28)
EXPRESSIBLE = {
    "olmoe": MOE,
    "olmo": OLMO,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "granitemoeshared": GRANITE,
}
WITH_DENSE_LAYERS = (QWEN3_MOE_DENSE_FIRST, QWEN2_MOE_EVERY_SECOND)
