"""The architectures of Hugging Face's transformers that compute what a model of ours does.

Supported: OLMo, Llama, Qwen2 and Qwen3 (dense), OLMoE, Mixtral, Qwen2-MoE, Qwen3-MoE and Granite's MoE with shared
experts; and those that other model families declare (docs/extending.md: a new architecture is a family's file). An
``Architecture`` declares when a model is of it, which options it needs, its fields of config.json, and the names of its
tensors. ``architecture_of`` takes the first of the model's family whose ``matches`` is true, so a narrower entry comes
before a wider one. What none of them computes is exported as ``OPTIMUS``, with modelling code of ours.

Source: the configuration classes and modelling code of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.optimus.config.family import families, family_of
from megatron.optimus.config.layer_pattern import shown
from megatron.optimus.config.schema import ConfigError, ModelConfig, Normalization, QKNormScope, ScoreFunction


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers, with what distinguishes it from the others.

    The first one of a family's whose ``matches`` is true of a model is the only one that is tried for it; an
    option that differs from its ``needs`` is then an error that names this architecture.
    """

    model_type: str
    class_name: str  # of the model, in config.json's "architectures"
    title: str  # for messages
    matches: Callable[[ModelConfig], bool]
    needs: dict[str, Any]  # our options that have one possible value
    extra_fields: frozenset[str]  # fields of config.json that not every architecture has, all of them optional
    constants: dict[str, Any] = field(default_factory=dict)  # fields with one supported value
    defaults: dict[str, Any] = field(default_factory=dict)  # what transformers assumes for a missing field
    has_head_dim: bool = True  # head width may differ from hidden_size / num_attention_heads
    has_dense_layers: bool = False  # some layers of a MoE model may be dense, as DENSE_FIELDS say
    # Fields of config.json: width of the MLP (of one expert in MoE models), number of experts, and width of the shared
    # experts where there are any.
    inner_field: str = "intermediate_size"
    experts_field: str = "num_experts"
    shared_field: str = ""
    # Tensors: the module with the experts, its gate, up and down projection of one expert, and names in a layer that
    # differ from those of names.py.
    moe_module: str = "mlp"
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    names: dict[str, str] = field(default_factory=dict)
    own_options: frozenset[str] = frozenset()  # our options that config.json has under our names
    # Where config.json has other fields than those of config.py here: from these to its own, and back.
    to_config: Callable[[dict[str, Any]], dict[str, Any]] = dict
    from_config: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def is_moe(self) -> bool:
        """Whether its models have routed experts."""
        return "moe_router_score_function" in self.needs

    @property
    def has_own_code(self) -> bool:
        """Whether transformers has no such architecture: an export brings its code (``export/``)."""
        return bool(self.own_options)


DENSE_FIELDS = ("decoder_sparse_step", "mlp_only_layers")  # which layers of a MoE model have experts

_NO_BIAS = {"add_qkv_bias": False}
_RMS = {"normalization": Normalization.RMSNORM}
_MOE_NEEDS = {"moe_router_score_function": ScoreFunction.SOFTMAX, "moe_router_force_load_balancing": False}
_ROUTED_ALONE = {**_MOE_NEEDS, **_NO_BIAS, "moe_shared_expert_intermediate_size": 0}
_NO_QK_NORM = {**_RMS, "qk_layernorm": False}
_FULL_QK_NORM = {**_RMS, "qk_layernorm": True, "qk_layernorm_scope": QKNormScope.FULL}
_HEAD_QK_NORM = {**_RMS, "qk_layernorm": True, "qk_layernorm_scope": QKNormScope.HEAD}
_NO_CLIP = {"clip_qkv": None}
_OLMO_DEFAULTS = {"rope_theta": 10000.0, "max_position_embeddings": 2048, "num_key_value_heads": "num_attention_heads"}


def _has_shared_experts(config: ModelConfig) -> bool:
    return config.moe_shared_expert_intermediate_size > 0


def _routes_alone(config: ModelConfig) -> bool:
    return config.is_moe and not _has_shared_experts(config)


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture(
            "olmo",
            "OlmoForCausalLM",
            "OLMo (dense)",
            lambda c: not c.is_moe and c.normalization is Normalization.LAYERNORM_NONPARAMETRIC,
            # OlmoLayerNorm has no weights and a fixed epsilon.
            {"normalization": Normalization.LAYERNORM_NONPARAMETRIC, "qk_layernorm": False, "norm_epsilon": 1e-5}
            | _NO_BIAS,
            frozenset({"clip_qkv"}),
            has_head_dim=False,
            defaults=_OLMO_DEFAULTS,
        ),
        Architecture(
            "llama",
            "LlamaForCausalLM",
            "Llama (dense)",
            lambda c: not (c.is_moe or c.qk_layernorm or c.add_qkv_bias),
            {**_NO_QK_NORM, **_NO_CLIP, **_NO_BIAS},
            frozenset({"rms_norm_eps"}),
            {"mlp_bias": False},
            defaults={**_OLMO_DEFAULTS, "rms_norm_eps": 1e-6},
        ),
        Architecture(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen2 (dense)",
            lambda c: not (c.is_moe or c.qk_layernorm) and c.add_qkv_bias,
            {**_NO_QK_NORM, **_NO_CLIP, "add_qkv_bias": True},
            frozenset({"rms_norm_eps", "sliding_window", "max_window_layers", "layer_types"}),
            {"use_sliding_window": False},
            has_head_dim=False,
            defaults={**_OLMO_DEFAULTS, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        ),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            "Qwen3 (dense)",
            lambda c: not c.is_moe and c.qk_layernorm,
            {**_HEAD_QK_NORM, **_NO_CLIP, **_NO_BIAS},
            frozenset({"rms_norm_eps", "sliding_window", "max_window_layers", "layer_types"}),
            {"use_sliding_window": False},
        ),
        Architecture(
            "olmoe",
            "OlmoeForCausalLM",
            "OLMoE",
            lambda c: _routes_alone(c) and c.qk_layernorm and c.qk_layernorm_scope is QKNormScope.FULL,
            {**_FULL_QK_NORM, **_ROUTED_ALONE},
            frozenset({"clip_qkv", "rms_norm_eps", "norm_topk_prob"}),
            has_head_dim=False,
            defaults={
                **_OLMO_DEFAULTS,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
                "router_aux_loss_coef": 0.01,
            },
        ),
        Architecture(
            "mixtral",
            "MixtralForCausalLM",
            "Mixtral",
            lambda c: _routes_alone(c) and not c.qk_layernorm,
            {**_NO_QK_NORM, **_NO_CLIP, **_ROUTED_ALONE, "moe_router_norm_topk_prob": True},
            frozenset({"rms_norm_eps"}),
            {"sliding_window": None, "router_jitter_noise": 0.0},
            defaults={"router_aux_loss_coef": 0.001},
            experts_field="num_local_experts",
            moe_module="block_sparse_moe",
            expert_projections=("w1", "w3", "w2"),
        ),
        Architecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            "Qwen2-MoE",
            lambda c: _has_shared_experts(c) and c.moe_shared_expert_gate,
            {**_NO_QK_NORM, **_NO_CLIP, **_MOE_NEEDS, "moe_shared_expert_gate": True},
            frozenset({"rms_norm_eps", "norm_topk_prob", "moe_intermediate_size"})
            | {"qkv_bias", "sliding_window", "max_window_layers", "layer_types", *DENSE_FIELDS},
            {"use_sliding_window": False},
            has_head_dim=False,
            has_dense_layers=True,
            inner_field="moe_intermediate_size",
            shared_field="shared_expert_intermediate_size",
            defaults={
                **_OLMO_DEFAULTS,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "router_aux_loss_coef": 0.001,
                "norm_topk_prob": False,
                "qkv_bias": True,
            },
        ),
        Architecture(
            "granitemoeshared",
            "GraniteMoeSharedForCausalLM",
            "GraniteMoeShared",
            lambda c: _has_shared_experts(c) and not c.moe_shared_expert_gate,
            # Its softmax over the chosen logits is that over all of them, normalised over the chosen.
            {**_NO_QK_NORM, **_NO_CLIP, **_MOE_NEEDS, **_NO_BIAS}
            | {"moe_router_norm_topk_prob": True, "moe_shared_expert_gate": False},
            frozenset({"rms_norm_eps", "attention_multiplier"}),
            {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
            has_head_dim=False,
            experts_field="num_local_experts",
            shared_field="shared_intermediate_size",
            defaults={**_OLMO_DEFAULTS, "rms_norm_eps": 1e-6, "router_aux_loss_coef": 0.001}
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 1.0},
            names={  # both projections of the shared experts in one matrix, all experts in one tensor, as ours
                "moe.shared_experts.mlp.gate_proj.weight": "shared_mlp.input_linear.weight",
                "moe.shared_experts.mlp.up_proj.weight": "shared_mlp.input_linear.weight",
                "moe.shared_experts.mlp.down_proj.weight": "shared_mlp.output_linear.weight",
                "moe.router.weight": "block_sparse_moe.router.layer.weight",
                "moe.experts.gate_up_weight": "block_sparse_moe.input_linear.weight",
                "moe.experts.down_weight": "block_sparse_moe.output_linear.weight",
            },
        ),
        Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen3-MoE",
            lambda c: _routes_alone(c) and c.qk_layernorm and c.qk_layernorm_scope is QKNormScope.HEAD,
            {**_HEAD_QK_NORM, **_NO_CLIP, **_ROUTED_ALONE},
            frozenset({"rms_norm_eps", "norm_topk_prob", "moe_intermediate_size", "sliding_window"})
            | {"max_window_layers", *DENSE_FIELDS},
            {"use_sliding_window": False},
            has_dense_layers=True,
            inner_field="moe_intermediate_size",
            defaults={"router_aux_loss_coef": 0.001, "norm_topk_prob": False},
        ),
    )
}
# Whatever the decoder computes. Experts are stacked as ours are, two tensors a layer: one matrix an expert would be
# 46,659 tensors for Mula-220B, which transformers would stack again while it loads them.
OPTIMUS = Architecture(
    "optimus",
    "OptimusForCausalLM",
    "Optimus",
    lambda c: True,
    {"moe_router_force_load_balancing": False},
    frozenset({"clip_qkv", "rms_norm_eps", "norm_topk_prob", "moe_intermediate_size", "auto_map", *DENSE_FIELDS}),
    has_dense_layers=True,
    inner_field="moe_intermediate_size",
    names={
        "moe.router.weight": "mlp.gate.weight",
        "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "moe.experts.gate_up_weight": "mlp.experts.gate_up_proj",
        "moe.experts.down_weight": "mlp.experts.down_proj",
    },
    own_options=frozenset({"normalization", "qk_layernorm", "qk_layernorm_scope", "add_qkv_bias"})
    | {"moe_router_score_function", "moe_router_enable_expert_bias", "moe_shared_expert_gate"}
    | {"moe_shared_expert_intermediate_size"},
)
# What other models have and ours lacks, by the fields that switch it on.
UNSUPPORTED_FEATURES = {
    "kv_lora_rank": "multi-head latent attention",
    "n_group": "group-limited routing",
    "num_nextn_predict_layers": "multi-token prediction",
    "partial_rotary_factor": "rotation of a part of each head",
    "final_logit_softcapping": "capped logits",
    "routed_scaling_factor": "a factor on the experts' sum",
    "quantization_config": "quantized weights",
}


def architectures() -> dict[str, tuple[str, Architecture]]:
    """The architectures of all families by model_type, each with the name of its family."""
    found = {one.model_type: (name, one) for name, family in families().items() for one in family.architectures}
    return {**found, OPTIMUS.model_type: ("decoder", OPTIMUS)}


def exported_architecture(config: ModelConfig, *, biased: bool) -> tuple[Architecture, str]:
    """The architecture that an export has, and why it is none of transformers' own.

    Args:
        config: the model.
        biased: whether the choice of experts depends on biases that are not zero.

    Returns:
        One of transformers' own and "", or ``OPTIMUS`` and the reason.

    Raises:
        ConfigError: the model is of a family with parts of its own that names no architecture for it.
    """
    try:
        architecture = architecture_of(config)
        if not biased or "moe.router.expert_bias" in architecture.names:
            return architecture, ""
        reason = f"moe_router_enable_expert_bias=True has no equivalent in Hugging Face's {architecture.title}"
    except ConfigError as error:
        if family_of(config).has_own_parts or config.moe_router_force_load_balancing:
            raise
        reason = str(error)
    return OPTIMUS, reason


def export_notice(config: ModelConfig) -> str:
    """One line, before the training, on how its model will leave; empty where transformers has the architecture."""
    try:
        _, reason = exported_architecture(config, biased=config.moe_router_enable_expert_bias)
    except ConfigError as error:
        return f"export to Hugging Face: not possible, {error}"
    if not reason:
        return ""
    return (
        f"export to Hugging Face: with modelling code of its own (trust_remote_code=True), which servers such as vLLM "
        f"do not have, because {reason}"
    )


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture that computes what ``config`` does. Raises ConfigError naming the option that none expresses."""
    c = config
    architecture = next((one for one in family_of(c).architectures if one.matches(c)), None)
    if architecture is None:
        raise ConfigError(f"model_family={c.model_family} names no architecture of Hugging Face for this model")
    for option, needed in architecture.needs.items():
        value = getattr(c, option)
        if value != needed:
            raise ConfigError(
                f"{option}={getattr(value, 'value', value)} has no equivalent in Hugging Face's {architecture.title}, "
                f"which needs {getattr(needed, 'value', needed)}"
            )
    if c.is_moe and c.has_dense_layers and not architecture.has_dense_layers:
        raise ConfigError(
            f"moe_layer_freq={shown(c.moe_layer_freq)} has no equivalent in Hugging Face's {architecture.title}, all "
            "of whose layers have experts"
        )
    if not architecture.has_head_dim and c.head_dim * c.num_attention_heads != c.hidden_size:
        raise ConfigError(
            f"kv_channels={c.kv_channels} has no equivalent in Hugging Face's {architecture.title}, which needs "
            f"hidden_size / num_attention_heads = {c.hidden_size}/{c.num_attention_heads}"
        )
    return architecture
