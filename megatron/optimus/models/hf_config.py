"""Our model options in the words of Hugging Face's config.json, and back.

A field that bears on the function and that we do not know is refused by name, in both directions.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.optimus.config.layer_pattern import MOST_LAYERS
from megatron.optimus.config.schema import ConfigError, ModelConfig, RotaryScaling, one_of
from megatron.optimus.models.hf_families import FAMILIES, LACKING, Family, family_of
from megatron.optimus.models.hf_rope import ROPE_FIELDS, rope_options, rope_parameters
from megatron.optimus.models.hf_values import flag, number

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


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json.

    ``dtype``: torch's name, such as "bfloat16". Token ids are null: the caller knows the tokenizer. Raises ConfigError
    naming the option that no architecture can express.
    """
    c, family = config, family_of(config)
    rope = rope_parameters(c)
    scaled = c.rotary_scaling is not RotaryScaling.NONE
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.ffn_hidden_size if c.has_dense_layers else c.moe_ffn_hidden_size,
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
    if c.add_qkv_bias:
        del result["attention_bias"]  # these architectures do not have the field, and biases all the same
    if c.is_moe:
        result |= {
            family.inner_field: c.moe_ffn_hidden_size,
            family.experts_field: c.num_experts,
            **({family.shared_field: c.moe_shared_expert_intermediate_size} if family.shared_field else {}),
            "num_experts_per_tok": c.moe_router_topk,
            "router_aux_loss_coef": c.moe_aux_loss_coeff,
            "output_router_logits": False,
        }
    optional = {
        "clip_qkv": c.clip_qkv,
        "rms_norm_eps": c.norm_epsilon,
        "norm_topk_prob": c.moe_router_norm_topk_prob,
        "sliding_window": None,
        "qkv_bias": c.add_qkv_bias,
        "attention_multiplier": c.head_dim**-0.5,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(set(range(c.num_layers)) - set(c.moe_layers)) if c.has_dense_layers else [],
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
    heads = number(hf, "num_attention_heads", int)
    if hf.get("num_key_value_heads") == "num_attention_heads":
        hf["num_key_value_heads"] = heads
    options: dict[str, Any] = {
        **{name: value for name, value in family.needs.items()},
        "num_layers": number(hf, "num_hidden_layers", int),
        "hidden_size": number(hf, "hidden_size", int),
        "num_attention_heads": heads,
        "num_query_groups": number(hf, "num_key_value_heads", int),
        "vocab_size": number(hf, "vocab_size", int),
        "max_position_embeddings": number(hf, "max_position_embeddings", int),
        "init_method_std": number(hf, "initializer_range", float, 0.02),
        "untie_embeddings_and_output_weights": not flag(hf, "tie_word_embeddings"),
        **rope_options(hf),
    }
    if "head_dim" in hf:
        options["kv_channels"] = number(hf, "head_dim", int)
        if not family.has_head_dim and options["kv_channels"] * heads != options["hidden_size"]:
            raise ConfigError(f"config.json: head_dim={hf['head_dim']!r} must be hidden_size / num_attention_heads")
    if "clip_qkv" in hf:
        options["clip_qkv"] = number(hf, "clip_qkv", float)
    if "rms_norm_eps" in family.extra_fields:
        options["norm_epsilon"] = number(hf, "rms_norm_eps", float)
    if not family.is_moe:
        return ModelConfig(**options, ffn_hidden_size=number(hf, "intermediate_size", int), num_experts=0)
    if "norm_topk_prob" in family.extra_fields:
        options["moe_router_norm_topk_prob"] = flag(hf, "norm_topk_prob")
    if "qkv_bias" in family.extra_fields:
        options["add_qkv_bias"] = flag(hf, "qkv_bias")
    if family.shared_field:
        options["moe_shared_expert_intermediate_size"] = number(hf, family.shared_field, int)
    if "attention_multiplier" in family.extra_fields:
        usual, given = (options["hidden_size"] / heads) ** -0.5, number(hf, "attention_multiplier", float)
        if not math.isclose(given, usual, rel_tol=1e-6):
            raise ConfigError(f"config.json: attention_multiplier={given} is not supported; only {usual:.6g} is")
    options |= _dense_layers(hf, options["num_layers"])
    # transformers >= 5 writes num_local_experts where earlier versions wrote num_experts.
    experts = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    if hf.get(experts) != hf.get("num_experts", hf.get(experts)):
        raise ConfigError(f"config.json: num_experts={hf['num_experts']!r}, but {experts}={hf[experts]!r}")
    return ModelConfig(
        **options,
        moe_ffn_hidden_size=number(hf, family.inner_field, int),
        num_experts=number(hf, experts, int),
        moe_router_topk=number(hf, "num_experts_per_tok", int),
        moe_aux_loss_coeff=number(hf, "router_aux_loss_coef", float),
    )


def _dense_layers(hf: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Our options for which layers have experts, and how wide the others are; fields of DENSE_FIELDS are refused before
    where the architecture does not have them."""
    step, dense = number(hf, "decoder_sparse_step", int, 1), hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"config.json: mlp_only_layers={dense!r} must be a list of layers' numbers")
    if step == 1 and not dense:
        return {}
    if num_layers > MOST_LAYERS:  # of a damaged file: no list of them
        raise ConfigError(f"config.json: num_layers={num_layers}; at most {MOST_LAYERS} may differ from each other")
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    if all(pattern):
        return {}
    return {"moe_layer_freq": pattern, "ffn_hidden_size": number(hf, "intermediate_size", int)}


def _supported_family(hf: dict[str, Any]) -> Family:
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    lacking = [f"{what} ({name}={hf[name]!r})" for name, what in LACKING.items() if hf.get(name)]
    rope = hf.get("rope_scaling")
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if isinstance(kind, str) and kind not in ROPE_FIELDS:
        lacking.append(f"stretched rotation of this kind (rope_scaling={kind!r})")
    reason = f"; it needs what this model does not have: {', '.join(lacking)}" if lacking else ""
    raise ConfigError(
        f"config.json: model_type={model_type!r} is not supported{reason}; supported: {one_of(sorted(FAMILIES))}"
    )


def _refuse_unknown_fields(hf: dict[str, Any], family: Family) -> None:
    only = _SAME_IN_EVERY_MODEL | family.constants
    known = _READ_FIELDS | _BOOKKEEPING_FIELDS | family.extra_fields | {family.shared_field}
    known |= _READ_FIELDS_MOE if family.is_moe else set()
    for name, value in hf.items():
        if name in only:
            if value is not None and value != only[name]:
                raise ConfigError(f"config.json: {name}={value!r} is not supported; only {only[name]!r} is")
        elif name not in known and value is not None:
            raise ConfigError(
                f"config.json: {name}={value!r} is not supported for model_type {family.model_type!r}"
                + (f" ({LACKING[name]})" if name in LACKING else "")
            )
    if any(kind != "full_attention" for kind in hf.get("layer_types") or []):
        raise ConfigError(f"config.json: layer_types={hf['layer_types']!r} is not supported; only full_attention is")
