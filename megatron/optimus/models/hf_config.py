"""Our model options in the words of Hugging Face's config.json, and back.

Supported: OLMo, Llama and Qwen3 (dense), OLMoE, Mixtral and Qwen3-MoE. Which of them a model is follows from its norms.
A field that bears on the function and that we do not know is refused by name, in both directions.

Source: the configuration classes and modelling code of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.optimus.config.schema import (
    ConfigError,
    ModelConfig,
    Normalization,
    QKNormScope,
    RotaryScaling,
    ScoreFunction,
    one_of,
)

_SAME_IN_EVERY_MODEL = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
_READ_FIELDS = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}
_READ_FIELDS_MOE = {"num_experts", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"}
# Say nothing about the weights or the function they compute.
_BOOKKEEPING_FIELDS = {
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "pretraining_tp",  # a way to compute, not what is computed
    "_name_or_path",
    "_attn_implementation_autoset",
}


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    architecture: str
    title: str  # for messages
    needs: dict[str, Any]  # our options that have one possible value
    extra_fields: frozenset[str]  # fields of config.json that not every family has, all of them optional
    constants: dict[str, Any] = field(default_factory=dict)  # fields with one supported value
    has_head_dim: bool = True  # head width may differ from hidden_size / num_attention_heads
    inner_field: str = "intermediate_size"  # width of the MLP, of one expert in MoE models
    experts_field: str = "num_experts"
    defaults: dict[str, Any] = field(default_factory=dict)  # what transformers assumes for a missing field

    @property
    def is_moe(self) -> bool:
        return "moe_router_score_function" in self.needs


_RMS = {"normalization": Normalization.RMSNORM}
_MOE_NEEDS = {"moe_router_score_function": ScoreFunction.SOFTMAX, "moe_router_force_load_balancing": False}
_NO_QK_NORM = {**_RMS, "qk_layernorm": False}
_FULL_QK_NORM = {**_RMS, "qk_layernorm": True, "qk_layernorm_scope": QKNormScope.FULL}
_HEAD_QK_NORM = {**_RMS, "qk_layernorm": True, "qk_layernorm_scope": QKNormScope.HEAD}
_NO_CLIP = {"clip_qkv": None}
_OLMO_DEFAULTS = {"rope_theta": 10000.0, "max_position_embeddings": 2048, "num_key_value_heads": "num_attention_heads"}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "olmo",
            "OlmoForCausalLM",
            "OLMo (dense)",
            # OlmoLayerNorm has no weights and a fixed epsilon.
            {"normalization": Normalization.LAYERNORM_NONPARAMETRIC, "qk_layernorm": False, "norm_epsilon": 1e-5},
            frozenset({"clip_qkv"}),
            has_head_dim=False,
            defaults=_OLMO_DEFAULTS,
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            "Llama (dense)",
            {**_NO_QK_NORM, **_NO_CLIP},
            frozenset({"rms_norm_eps"}),
            {"mlp_bias": False},
            defaults={**_OLMO_DEFAULTS, "rms_norm_eps": 1e-6},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "Qwen3 (dense)",
            {**_HEAD_QK_NORM, **_NO_CLIP},
            frozenset({"rms_norm_eps", "sliding_window", "max_window_layers", "layer_types"}),
            {"use_sliding_window": False},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            "OLMoE",
            {**_FULL_QK_NORM, **_MOE_NEEDS},
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
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "Mixtral",
            {**_NO_QK_NORM, **_NO_CLIP, **_MOE_NEEDS, "moe_router_norm_topk_prob": True},
            frozenset({"rms_norm_eps"}),
            {"sliding_window": None, "router_jitter_noise": 0.0},
            experts_field="num_local_experts",
            defaults={"router_aux_loss_coef": 0.001},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen3-MoE",
            {**_HEAD_QK_NORM, **_NO_CLIP, **_MOE_NEEDS},
            frozenset({"rms_norm_eps", "norm_topk_prob", "moe_intermediate_size", "sliding_window"})
            | {"max_window_layers"},
            {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            inner_field="moe_intermediate_size",
            defaults={"router_aux_loss_coef": 0.001, "norm_topk_prob": False},
        ),
    )
}
# What models of other families have and ours lacks, by the fields that switch it on.
_LACKING = {
    "kv_lora_rank": "multi-head latent attention",
    "n_shared_experts": "shared experts",
    "num_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "n_group": "group-limited routing",
    "first_k_dense_replace": "dense layers before the MoE layers",
    "num_nextn_predict_layers": "multi-token prediction",
    "partial_rotary_factor": "rotation of a part of each head",
    "final_logit_softcapping": "capped logits",
    "routed_scaling_factor": "a factor on the experts' sum",
    "quantization_config": "quantized weights",
}


def family_of(config: ModelConfig) -> Family:
    """The architecture that computes what ``config`` does. Raises ConfigError naming the option that none expresses."""
    c = config
    if c.is_moe:
        full, head, none = "olmoe", "qwen3_moe", "mixtral"
    else:
        full, head, none = "qwen3", "qwen3", "llama"
    if c.normalization is Normalization.LAYERNORM_NONPARAMETRIC and not c.is_moe:
        family = FAMILIES["olmo"]
    elif not c.qk_layernorm:
        family = FAMILIES[none]
    else:
        family = FAMILIES[head if c.qk_layernorm_scope is QKNormScope.HEAD else full]
    for option, needed in family.needs.items():
        value = getattr(c, option)
        if value != needed:
            raise ConfigError(
                f"{option}={getattr(value, 'value', value)} has no equivalent in Hugging Face's {family.title}, "
                f"which needs {getattr(needed, 'value', needed)}"
            )
    if not family.has_head_dim and c.head_dim * c.num_attention_heads != c.hidden_size:
        raise ConfigError(
            f"kv_channels={c.kv_channels} has no equivalent in Hugging Face's {family.title}, which needs "
            f"hidden_size / num_attention_heads = {c.hidden_size}/{c.num_attention_heads}"
        )
    return family


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json.

    ``dtype``: torch's name, such as "bfloat16". Token ids are null: the caller knows the tokenizer. Raises ConfigError
    naming the option that no architecture can express.
    """
    c, family = config, family_of(config)
    rope = _rope_parameters(c)
    scaled = c.rotary_scaling is not RotaryScaling.NONE
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.moe_ffn_hidden_size if c.is_moe else c.ffn_hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_kv_heads,
        "max_position_embeddings": c.max_position_embeddings,
        "initializer_range": c.init_method_std,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        "rope_theta": c.rotary_base,
        "rope_parameters": rope,  # transformers >= 5 reads this one, earlier versions the other two
        "rope_scaling": {name: value for name, value in rope.items() if name != "rope_theta"} if scaled else None,
        # Explicit: the architectures' own defaults name tokens that this vocabulary may not have.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        **_SAME_IN_EVERY_MODEL,
        **family.constants,
    }
    if family.has_head_dim:
        result["head_dim"] = c.head_dim
    if c.is_moe:
        result |= {
            family.inner_field: c.moe_ffn_hidden_size,
            family.experts_field: c.num_experts,
            "num_experts_per_tok": c.moe_router_topk,
            "router_aux_loss_coef": c.moe_aux_loss_coeff,
            "output_router_logits": False,
        }
    optional = {
        "clip_qkv": c.clip_qkv,
        "rms_norm_eps": c.norm_epsilon,
        "norm_topk_prob": c.moe_router_norm_topk_prob,
        "sliding_window": None,
    }
    return result | {name: value for name, value in optional.items() if name in family.extra_fields}


def model_config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Our options for a Hugging Face config.json.

    Raises ConfigError naming the first field that is missing, of the wrong type, or not supported.
    """
    family = _supported_family(hf)
    _refuse_unknown_fields(hf, family)
    hf = {name: value for name, value in family.defaults.items() if value is not None} | {
        name: value for name, value in hf.items() if value is not None
    }
    heads = _number(hf, "num_attention_heads", int)
    if hf.get("num_key_value_heads") == "num_attention_heads":
        hf["num_key_value_heads"] = heads
    options: dict[str, Any] = {
        **{name: value for name, value in family.needs.items()},
        "num_layers": _number(hf, "num_hidden_layers", int),
        "hidden_size": _number(hf, "hidden_size", int),
        "num_attention_heads": heads,
        "num_query_groups": _number(hf, "num_key_value_heads", int),
        "vocab_size": _number(hf, "vocab_size", int),
        "max_position_embeddings": _number(hf, "max_position_embeddings", int),
        "init_method_std": _number(hf, "initializer_range", float, 0.02),
        "untie_embeddings_and_output_weights": not _flag(hf, "tie_word_embeddings"),
        **_rope_options(hf),
    }
    if "head_dim" in hf:
        options["kv_channels"] = _number(hf, "head_dim", int)
        if not family.has_head_dim and options["kv_channels"] * heads != options["hidden_size"]:
            raise ConfigError(f"config.json: head_dim={hf['head_dim']!r} must be hidden_size / num_attention_heads")
    if "clip_qkv" in hf:
        options["clip_qkv"] = _number(hf, "clip_qkv", float)
    if "rms_norm_eps" in family.extra_fields:
        options["norm_epsilon"] = _number(hf, "rms_norm_eps", float)
    if not family.is_moe:
        return ModelConfig(**options, ffn_hidden_size=_number(hf, "intermediate_size", int), num_experts=0)
    if "norm_topk_prob" in family.extra_fields:
        options["moe_router_norm_topk_prob"] = _flag(hf, "norm_topk_prob")
    # transformers >= 5 writes num_local_experts where earlier versions wrote num_experts.
    experts = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    if hf.get(experts) != hf.get("num_experts", hf.get(experts)):
        raise ConfigError(f"config.json: num_experts={hf['num_experts']!r}, but {experts}={hf[experts]!r}")
    return ModelConfig(
        **options,
        moe_ffn_hidden_size=_number(hf, family.inner_field, int),
        num_experts=_number(hf, experts, int),
        moe_router_topk=_number(hf, "num_experts_per_tok", int),
        moe_aux_loss_coeff=_number(hf, "router_aux_loss_coef", float),
    )


def _supported_family(hf: dict[str, Any]) -> Family:
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    lacking = [f"{what} ({name}={hf[name]!r})" for name, what in _LACKING.items() if hf.get(name)]
    rope = hf.get("rope_scaling")
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if isinstance(kind, str) and kind not in _ROPE_FIELDS:
        lacking.append(f"stretched rotation of this kind (rope_scaling={kind!r})")
    reason = f"; it needs what this model does not have: {', '.join(lacking)}" if lacking else ""
    raise ConfigError(
        f"config.json: model_type={model_type!r} is not supported{reason}; supported: {one_of(sorted(FAMILIES))}"
    )


def _refuse_unknown_fields(hf: dict[str, Any], family: Family) -> None:
    only = _SAME_IN_EVERY_MODEL | family.constants
    known = _READ_FIELDS | _BOOKKEEPING_FIELDS | family.extra_fields | (_READ_FIELDS_MOE if family.is_moe else set())
    for name, value in hf.items():
        if name in only:
            if value is not None and value != only[name]:
                raise ConfigError(f"config.json: {name}={value!r} is not supported; only {only[name]!r} is")
        elif name not in known and value is not None:
            raise ConfigError(
                f"config.json: {name}={value!r} is not supported for model_type {family.model_type!r}"
                + (f" ({_LACKING[name]})" if name in _LACKING else "")
            )
    if any(kind != "full_attention" for kind in hf.get("layer_types") or []):
        raise ConfigError(f"config.json: layer_types={hf['layer_types']!r} is not supported; only full_attention is")


def _number(hf: dict[str, Any], name: str, kind: type, default: float | None = None) -> Any:
    value = hf.get(name, default)
    accepted = (int,) if kind is int else (int, float)
    if not isinstance(value, accepted) or isinstance(value, bool) or (kind is int and value < 1):
        raise ConfigError(f"config.json: {name}={value!r} must be a {'positive integer' if kind is int else 'number'}")
    return kind(value)


def _flag(hf: dict[str, Any], name: str) -> bool:
    value = hf.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return value


def _rope_parameters(c: ModelConfig) -> dict[str, Any]:
    if c.rotary_scaling is RotaryScaling.NONE:
        return {"rope_type": "default", "rope_theta": c.rotary_base}
    result: dict[str, Any] = {
        "rope_type": c.rotary_scaling.value,
        "rope_theta": c.rotary_base,
        "factor": c.rotary_scaling_factor,
    }
    if c.rotary_scaling is RotaryScaling.LLAMA3:
        result |= {
            "low_freq_factor": c.rotary_low_freq_factor,
            "high_freq_factor": c.rotary_high_freq_factor,
            "original_max_position_embeddings": c.rotary_original_positions,
        }
    return result


_ROPE_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope_options(hf: dict[str, Any]) -> dict[str, Any]:
    """transformers >= 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
    options: dict[str, Any] = {}
    theta = hf.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ConfigError(f"config.json: {name}={rope!r} must be an object")
        kind = rope.get("rope_type", rope.get("type"))
        fields = _ROPE_FIELDS.get(kind) if isinstance(kind, str) else None
        found = {key for key, value in rope.items() if value is not None} - {"rope_type", "type", "rope_theta"}
        if fields is None or found != fields:
            raise ConfigError(
                f"config.json: {name}={rope!r} is not supported; supported are the rope_types "
                f"{one_of(f'{key!r} with {sorted(value)}' for key, value in _ROPE_FIELDS.items())}"
            )
        theta = rope.get("rope_theta") or theta
        options["rotary_scaling"] = RotaryScaling.NONE if kind == "default" else RotaryScaling(kind)
        if kind != "default":
            options["rotary_scaling_factor"] = _number(rope, "factor", float)
        if kind == "llama3":
            options["rotary_low_freq_factor"] = _number(rope, "low_freq_factor", float)
            options["rotary_high_freq_factor"] = _number(rope, "high_freq_factor", float)
            options["rotary_original_positions"] = _number(rope, "original_max_position_embeddings", int)
    return {"rotary_base": _number({"rope_theta": theta}, "rope_theta", float), **options}
