"""Exports have the fields of config.json and the names of weights that vLLM and SGLang read, for every architecture.

Read in the model files of vLLM 0.33.0 and SGLang 0.5.23: every field that they take without a default, but for those
that transformers' class of the configuration fills in (pad_token_id), and every name that their loaders know. vLLM has
no file for olmo, and runs transformers' own model. Neither server runs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from megatron.optimus.config.schema import ModelConfig, Normalization, QKNormScope
from megatron.optimus.convert.hf import hf_tensors
from megatron.optimus.models.huggingface.architectures import ARCHITECTURES, architecture_of
from megatron.optimus.models.huggingface.config import hf_config

LAYERS, EXPERTS = 2, 4
SHAPE = dict(num_layers=LAYERS, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=264)
MOE = SHAPE | dict(num_experts=EXPERTS, moe_ffn_hidden_size=24, moe_router_topk=2)

# What both read of config.json in every model, and of every layer's weights.
FIELDS = "architectures model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size \
    max_position_embeddings rope_parameters tie_word_embeddings".split()
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
BIASES = [f"self_attn.{name}_proj.bias" for name in "qkv"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MLP = [f"mlp.{name}.weight" for name in PROJECTIONS]
ROUTED = ["mlp.gate.weight", *(f"mlp.experts.{e}.{name}.weight" for e in range(EXPERTS) for name in PROJECTIONS)]
SHARED = ["mlp.shared_expert_gate.weight", *(f"mlp.shared_expert.{name}.weight" for name in PROJECTIONS)]


@dataclass(frozen=True)
class Expected:
    """What the model files read of one architecture."""

    model: ModelConfig
    class_name: str  # in the registries of both
    weights: list[str]  # of a layer
    fields: list[str] = field(default_factory=list)  # of config.json beside FIELDS
    has_norm: bool = True
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # where one tensor has what others have in several


def model(shape: dict, **options: object) -> ModelConfig:
    return ModelConfig(**(shape | dict(qk_layernorm=False) | options))


HEAD = dict(qk_layernorm=True, qk_layernorm_scope=QKNormScope.HEAD)
TABLE = {
    "olmo": Expected(
        model(SHAPE, normalization=Normalization.LAYERNORM_NONPARAMETRIC, norm_epsilon=1e-5),
        "OlmoForCausalLM", ATTENTION + MLP, ["intermediate_size", "clip_qkv", "attention_bias"], has_norm=False,
    ),
    "llama": Expected(
        model(SHAPE, num_query_groups=2), "LlamaForCausalLM", ATTENTION + NORMS + MLP,
        ["intermediate_size", "rms_norm_eps", "hidden_act", "head_dim"],
    ),
    "qwen2": Expected(
        model(SHAPE, add_qkv_bias=True), "Qwen2ForCausalLM", ATTENTION + NORMS + MLP + BIASES,
        ["intermediate_size", "rms_norm_eps", "hidden_act"],
    ),
    "qwen3": Expected(
        model(SHAPE, **HEAD), "Qwen3ForCausalLM", ATTENTION + NORMS + MLP + QK_NORMS,
        ["intermediate_size", "rms_norm_eps", "hidden_act", "head_dim", "attention_bias"],
    ),
    "olmoe": Expected(
        model(MOE, qk_layernorm=True), "OlmoeForCausalLM", ATTENTION + NORMS + QK_NORMS + ROUTED,
        ["intermediate_size", "num_experts", "num_experts_per_tok"],
    ),
    "mixtral": Expected(
        model(MOE, moe_router_norm_topk_prob=True), "MixtralForCausalLM",
        [*ATTENTION, *NORMS, "block_sparse_moe.gate.weight"]
        + [f"block_sparse_moe.experts.{e}.{name}.weight" for e in range(EXPERTS) for name in ("w1", "w2", "w3")],
        ["intermediate_size", "num_local_experts", "num_experts_per_tok", "rms_norm_eps"],
    ),
    "qwen2_moe": Expected(
        model(MOE, add_qkv_bias=True, moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True),
        "Qwen2MoeForCausalLM", ATTENTION + NORMS + BIASES + ROUTED + SHARED,
        ["moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok",
         "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "rms_norm_eps", "hidden_act"],
    ),
    "granitemoeshared": Expected(
        model(MOE, moe_router_norm_topk_prob=True, moe_shared_expert_intermediate_size=16),
        "GraniteMoeSharedForCausalLM",
        [*ATTENTION, *NORMS, "block_sparse_moe.router.layer.weight", "block_sparse_moe.input_linear.weight",
         "block_sparse_moe.output_linear.weight", "shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"],
        ["intermediate_size", "shared_intermediate_size", "num_local_experts", "num_experts_per_tok", "rms_norm_eps",
         "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "hidden_act"],
        shapes={"block_sparse_moe.input_linear.weight": (EXPERTS, 2 * 24, 32),
                "block_sparse_moe.output_linear.weight": (EXPERTS, 32, 24)},
    ),
    "qwen3_moe": Expected(
        model(MOE, moe_router_norm_topk_prob=True, **HEAD), "Qwen3MoeForCausalLM",
        ATTENTION + NORMS + QK_NORMS + ROUTED,
        ["moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step",
         "mlp_only_layers", "rms_norm_eps", "hidden_act", "head_dim", "attention_bias"],
    ),
}  # fmt: skip


def test_every_architecture_is_in_the_table() -> None:
    assert set(TABLE) == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", TABLE)
def test_fields_and_weights_are_those_that_servers_read(kind: str) -> None:
    expected = TABLE[kind]
    config = hf_config(expected.model, "bfloat16")
    assert architecture_of(expected.model).model_type == kind == config["model_type"]
    assert config["architectures"] == [expected.class_name]
    missing = [name for name in FIELDS + expected.fields if name not in config]
    assert not missing, f"config.json of {kind} lacks {missing}"
    assert config["rope_parameters"]["rope_theta"] == expected.model.rotary_base

    tensors = {tensor.key: tensor for tensor in hf_tensors(expected.model)}
    names = {f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in expected.weights}
    names |= {"model.embed_tokens.weight", "lm_head.weight"} | ({"model.norm.weight"} if expected.has_norm else set())
    assert set(tensors) == names
    for name, shape in expected.shapes.items():
        assert tensors[f"model.layers.0.{name}"].shape == shape
    assert {tensor.shape for name, tensor in tensors.items() if name.endswith("q_proj.weight")} == {(32, 32)}


def test_tied_embeddings_have_no_second_matrix() -> None:
    tied = replace(TABLE["llama"].model, untie_embeddings_and_output_weights=False)
    assert hf_config(tied, "bfloat16")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in {tensor.key for tensor in hf_tensors(tied)}
