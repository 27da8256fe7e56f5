import dataclasses

import pytest

from megatron.optimus.config.schema import (
    ConfigError,
    ModelConfig,
    Normalization,
    ScoreFunction,
)
from megatron.optimus.models.huggingface.architectures import architecture_of
from megatron.optimus.models.huggingface.config import hf_config, model_config_from_hf
from megatron.optimus.models.parameters import parameter_shapes
from tests.unit.models.huggingface.cases import (
    DENSE_MULA,
    EXPRESSIBLE,
    GRANITE,
    LLAMA,
    MIXTRAL,
    MOE,
    OLMO,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    WITH_DENSE_LAYERS,
)


@pytest.mark.parametrize("model_type", EXPRESSIBLE)
def test_the_architecture_follows_from_the_options(model_type):
    assert architecture_of(EXPRESSIBLE[model_type]).model_type == model_type


@pytest.mark.parametrize("config", [*EXPRESSIBLE.values(), *WITH_DENSE_LAYERS])
def test_configuration_round_trip(config):
    back = model_config_from_hf(hf_config(config, "bfloat16"))
    assert hf_config(back, "bfloat16") == hf_config(config, "bfloat16")
    assert parameter_shapes(back) == parameter_shapes(config)
    unused = {"moe_ffn_hidden_size", "moe_router_topk", "moe_aux_loss_coeff"}
    if config.is_moe:
        unused = set() if config.has_dense_layers else {"ffn_hidden_size"}
    for field in dataclasses.fields(ModelConfig):
        if field.name not in unused | {"kv_channels", "num_query_groups", "moe_router_norm_topk_prob"}:
            assert getattr(back, field.name) == getattr(config, field.name), field.name
    assert (back.head_dim, back.num_kv_heads) == (config.head_dim, config.num_kv_heads)
    assert not config.is_moe or back.moe_router_norm_topk_prob == config.moe_router_norm_topk_prob


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (DENSE_MULA, {}, "qk_layernorm_scope=full has no equivalent in Hugging Face's Qwen3"),
        (OLMO, {"qk_layernorm": True}, "qk_layernorm=True has no equivalent"),
        (OLMO, {"norm_epsilon": 1e-6}, "norm_epsilon=1e-06 has no equivalent"),
        (OLMO, {"kv_channels": 8}, "kv_channels=8 has no equivalent"),
        (MOE, {"qk_layernorm": False}, "clip_qkv=8.0 has no equivalent in Hugging Face's Mixtral"),
        (MIXTRAL, {"moe_router_norm_topk_prob": False}, "moe_router_norm_topk_prob=False has no equivalent"),
        (MOE, {"normalization": Normalization.LAYERNORM_NONPARAMETRIC}, "normalization=layernorm-nonparametric"),
        (MOE, {"moe_router_score_function": ScoreFunction.SIGMOID}, "moe_router_score_function=sigmoid"),
        (MOE, {"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
        (
            MOE,
            {"moe_layer_freq": [0, 1]},
            "moe_layer_freq=0 1 has no equivalent in Hugging Face's OLMoE, all of whose",
        ),
        (MIXTRAL, {"add_qkv_bias": True}, "add_qkv_bias=True has no equivalent in Hugging Face's Mixtral"),
        (QWEN3, {"add_qkv_bias": True}, "add_qkv_bias=True has no equivalent in Hugging Face's Qwen3"),
        (QWEN2_MOE, {"moe_shared_expert_gate": False}, "add_qkv_bias=True has no equivalent .* GraniteMoeShared"),
        (
            GRANITE,
            {"moe_router_norm_topk_prob": False},
            "moe_router_norm_topk_prob=False .* GraniteMoeShared.*needs T",
        ),
        (GRANITE, {"qk_layernorm": True}, "qk_layernorm=True has no equivalent in Hugging Face's GraniteMoeShared"),
        (QWEN2_MOE, {"qk_layernorm": True}, "qk_layernorm=True has no equivalent in Hugging Face's Qwen2-MoE"),
    ],
)
def test_what_hugging_face_cannot_express_is_named(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        hf_config(dataclasses.replace(config, **changes), "float32")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: granitemoeshared, llama, mixtral"),
        (
            # the fields of DeepSeek-V3's config.json that bear on the function, all of them
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_shared_experts": 1, "n_group": 8}
            | {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
            | {"quantization_config": {"quant_method": "fp8"}, "rope_scaling": {"type": "yarn", "factor": 40}},
            r"multi-head latent attention \(kv_lora_rank=512\), group-limited routing .*,"
            r" multi-token prediction .*, a factor on the experts' sum \(.*2.5\), quantized"
            r" weights .*, stretched rotation of this kind \(rope_scaling='yarn'\); supported: ",
        ),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 512, "n_shared_experts": 2, "first_k_dense_replace": 1},
            r"model_type='deepseek_v2' is not supported; it needs .*: multi-head latent attention "
            r"\(kv_lora_rank=512\); supported: ",
        ),
        ({"model_type": None}, "model_type=None"),
        ({"sliding_window": 128}, "sliding_window=128 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling="),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters="),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "must be an object"),
        ({"hidden_size": "16"}, "hidden_size='16' must be a positive integer"),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"num_experts": True}, "num_experts=True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        ({"head_dim": 8}, "head_dim=8"),
    ],
)
def test_unsupported_fields_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(hf_config(MOE, "float32") | changes)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096 is not supported; only None is"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL, {"num_key_value_heads": None}, "num_key_value_heads=None must be a positive integer"),
        (QWEN3_MOE, {"mlp_only_layers": "0"}, "mlp_only_layers='0' must be a list"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1]}, r"moe_layer_freq=0 0 \(2 numbers\)"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a positive integer"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8 is not supported"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be a positive"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size=None must be a posit"),
        (GRANITE, {"shared_intermediate_size": 0}, "shared_intermediate_size=0 must be a positive"),
        (GRANITE, {"attention_multiplier": 0.25}, "attention_multiplier=0.25 is not supported; only 0.5 is"),
        (GRANITE, {"attention_multiplier": None}, "attention_multiplier=1.0 is not supported; only 0.5 is"),
        (GRANITE, {"residual_multiplier": 0.22}, "residual_multiplier=0.22 is not supported; only 1.0 is"),
        (QWEN2_MOE, {"qkv_bias": 1}, "qkv_bias=1 must be true or false"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA, {"clip_qkv": 3.0}, "clip_qkv=3.0 is not supported for model_type 'llama'"),
    ],
)
def test_unsupported_fields_of_other_architectures_are_named(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(hf_config(config, "float32") | changes)


def test_a_field_of_the_other_architecture_is_refused():
    with pytest.raises(ConfigError, match="num_experts=4 is not supported for model_type 'olmo'"):
        model_config_from_hf(hf_config(OLMO, "float32") | {"num_experts": 4})


def test_which_layers_are_dense_is_read_as_transformers_reads_it():
    hf = hf_config(QWEN3_MOE, "float32") | {"num_hidden_layers": 6, "intermediate_size": 28}
    read = model_config_from_hf(hf | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert (list(read.moe_layers), read.ffn_hidden_size) == ([1, 5], 28)
    again = hf_config(read, "float32")
    assert (again["decoder_sparse_step"], again["mlp_only_layers"]) == (1, [0, 2, 3, 4])
