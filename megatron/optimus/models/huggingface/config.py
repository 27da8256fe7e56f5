"""Translates between our model options and Hugging Face's config.json.

A field that bears on the function and that we do not know is refused by name, in both directions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron.optimus.config.layer_pattern import MOST_LAYERS
from megatron.optimus.config.options import read_sections
from megatron.optimus.config.schema import ConfigError, ModelConfig, RotaryScaling, RunConfig, TokenizerType, one_of
from megatron.optimus.config.serialize import read_plain, to_dict
from megatron.optimus.config.tokenizer_files import definition_file
from megatron.optimus.models.huggingface.architectures import (
    UNSUPPORTED_FEATURES,
    Architecture,
    architecture_of,
    architectures,
)
from megatron.optimus.platform.hub import local_folder

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
# Of a run that goes on from a model: what does not change the function that the weights compute.
_FREE_OPTIONS = {
    "init_method_std",
    "parametrization",
    "base_hidden_size",
    "base_num_layers",
    "base_ffn_hidden_size",
    "base_moe_ffn_hidden_size",
    "max_position_embeddings",
    "output_z_loss_coeff",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
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

# Fields of each kind of rotation besides its theta.
_ROPE_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


# Where transformers finds the classes of an export that brings its code, models/huggingface/export.
AUTO_MAP = {"AutoConfig": "configuration_optimus.OptimusConfig"}
AUTO_MAP["AutoModelForCausalLM"] = "modeling_optimus.OptimusForCausalLM"


def hf_config(config: ModelConfig, dtype: str, architecture: Architecture | None = None) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: the model.
        dtype: torch's name, such as "bfloat16".
        architecture: of the export; None: the one that ``architecture_of`` finds.

    Returns:
        The fields. Token ids are null: the caller knows the tokenizer.

    Raises:
        ConfigError: no architecture can express an option, which the message names.
    """
    c, architecture = config, architecture or architecture_of(config)
    rope = _rope_parameters(c)
    scaled = c.rotary_scaling is not RotaryScaling.NONE
    result: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
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
        **architecture.constants,
    }
    if architecture.has_head_dim:
        result["head_dim"] = c.head_dim
    if c.add_qkv_bias:
        del result["attention_bias"]  # these architectures do not have the field, and biases all the same
    if c.is_moe:
        result |= {
            architecture.inner_field: c.moe_ffn_hidden_size,
            architecture.experts_field: c.num_experts,
            **({architecture.shared_field: c.moe_shared_expert_intermediate_size} if architecture.shared_field else {}),
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
    result |= {name: value for name, value in optional.items() if name in architecture.extra_fields}
    if architecture.has_own_code:
        plain = to_dict(RunConfig(model=c))["model"]
        result |= {"auto_map": AUTO_MAP, **{name: plain[name] for name in sorted(architecture.own_options)}}
    return architecture.to_config(result)


def model_config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Our options for a Hugging Face config.json.

    Raises ConfigError naming the first field that is missing, of the wrong type, or not supported.
    """
    family, architecture = supported_architecture(hf)
    hf = architecture.from_config(hf)
    _refuse_unknown_fields(hf, architecture)
    hf = {name: value for name, value in architecture.defaults.items() if value is not None} | {
        name: value for name, value in hf.items() if value is not None
    }
    heads = _number(hf, "num_attention_heads", int)
    if hf.get("num_key_value_heads") == "num_attention_heads":
        hf["num_key_value_heads"] = heads
    options: dict[str, Any] = {
        "model_family": family,
        **architecture.needs,
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
        if not architecture.has_head_dim and options["kv_channels"] * heads != options["hidden_size"]:
            raise ConfigError(f"config.json: head_dim={hf['head_dim']!r} must be hidden_size / num_attention_heads")
    if "clip_qkv" in hf:
        options["clip_qkv"] = _number(hf, "clip_qkv", float)
    if "rms_norm_eps" in architecture.extra_fields:
        options["norm_epsilon"] = _number(hf, "rms_norm_eps", float)
    options |= read_sections(
        {"model": {name: hf[name] for name in architecture.own_options & hf.keys()}}, "config.json"
    )
    if not (hf.get("num_experts") if architecture.has_own_code else architecture.is_moe):
        return ModelConfig(**options, ffn_hidden_size=_number(hf, "intermediate_size", int), num_experts=0)
    if "norm_topk_prob" in architecture.extra_fields:
        options["moe_router_norm_topk_prob"] = _flag(hf, "norm_topk_prob")
    if "qkv_bias" in architecture.extra_fields:
        options["add_qkv_bias"] = _flag(hf, "qkv_bias")
    if architecture.shared_field:
        options["moe_shared_expert_intermediate_size"] = _number(hf, architecture.shared_field, int)
    if "attention_multiplier" in architecture.extra_fields:
        usual, given = (options["hidden_size"] / heads) ** -0.5, _number(hf, "attention_multiplier", float)
        if not math.isclose(given, usual, rel_tol=1e-6):
            raise ConfigError(f"config.json: attention_multiplier={given} is not supported; only {usual:.6g} is")
    options |= _dense_layers(hf, options["num_layers"])
    # transformers >= 5 writes num_local_experts where earlier versions wrote num_experts.
    experts = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    if hf.get(experts) != hf.get("num_experts", hf.get(experts)):
        raise ConfigError(f"config.json: num_experts={hf['num_experts']!r}, but {experts}={hf[experts]!r}")
    return ModelConfig(
        **options,
        moe_ffn_hidden_size=_number(hf, architecture.inner_field, int),
        num_experts=_number(hf, experts, int),
        moe_router_topk=_number(hf, "num_experts_per_tok", int),
        moe_aux_loss_coeff=_number(hf, "router_aux_loss_coef", float),
    )


def take_from_hf(values: dict[str, Any]) -> dict[str, Any]:
    """Completes the options of a run that goes on from the Hugging Face folder in ``from_hf``.

    Args:
        values: ``{option: value}`` of the options that are given.

    Returns:
        These, with the model's and, where the folder has a tokenizer, ``tokenizer_model``.

    Raises:
        ConfigError: a given option contradicts the folder, or config.json cannot be read or has no equivalent.
    """
    folder = local_folder(values["from_hf"])
    source = folder / "config.json"
    if not source.is_file():
        raise ConfigError(
            f"from_hf={values['from_hf']!r} holds no config.json; name the folder of a Hugging Face model"
        )
    content = read_plain(str(source))
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: not a JSON object")
    try:
        model = to_dict(RunConfig(model=model_config_from_hf(content)))["model"]
    except ConfigError as error:
        raise ConfigError(f"{folder}/{error}") from error
    taken = read_sections({"model": model}, str(source))
    for name in taken.keys() & values.keys() - _FREE_OPTIONS:
        if values[name] != taken[name]:
            raise ConfigError(
                f"{name}={values[name]!r}, but {source} says {taken[name]!r}; leave --{name.replace('_', '-')} out, or "
                "change config.json if the weights are of such a model"
            )
    if definition_file(TokenizerType.HF, folder) is not None:
        taken["tokenizer_model"] = values["from_hf"] if folder == Path(values["from_hf"]) else str(folder)
        own = values.get("tokenizer_model")
        if own is not None and Path(own).resolve() not in (folder.resolve(), (folder / "tokenizer.json").resolve()):
            raise ConfigError(
                f"tokenizer_model={own!r}, but from_hf={values['from_hf']!r} has a tokenizer of its own, whose ids the "
                "weights know; leave --tokenizer-model out"
            )
    return taken | values


def _dense_layers(hf: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Our options for which layers have experts, and how wide the others are; fields of DENSE_FIELDS are refused before
    where the architecture does not have them."""
    step, dense = _number(hf, "decoder_sparse_step", int, 1), hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"config.json: mlp_only_layers={dense!r} must be a list of layers' numbers")
    if step == 1 and not dense:
        return {}
    if num_layers > MOST_LAYERS:  # of a damaged file: no list of them
        raise ConfigError(f"config.json: num_layers={num_layers}; at most {MOST_LAYERS} may differ from each other")
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    if all(pattern):
        return {}
    return {"moe_layer_freq": pattern, "ffn_hidden_size": _number(hf, "intermediate_size", int)}


def supported_architecture(hf: dict[str, Any]) -> tuple[str, Architecture]:
    """The name of a config.json's family, and its architecture. Raises ConfigError where it is not known."""
    model_type, known = hf.get("model_type"), architectures()
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    lacking = [f"{what} ({name}={hf[name]!r})" for name, what in UNSUPPORTED_FEATURES.items() if hf.get(name)]
    rope = hf.get("rope_scaling")
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if isinstance(kind, str) and kind not in _ROPE_FIELDS:
        lacking.append(f"stretched rotation of this kind (rope_scaling={kind!r})")
    reason = f"; it needs what this model does not have: {', '.join(lacking)}" if lacking else ""
    raise ConfigError(
        f"config.json: model_type={model_type!r} is not supported{reason}; supported: {one_of(sorted(known))}"
    )


def _refuse_unknown_fields(hf: dict[str, Any], architecture: Architecture) -> None:
    only = _SAME_IN_EVERY_MODEL | architecture.constants
    known = _READ_FIELDS | _BOOKKEEPING_FIELDS | architecture.extra_fields | {architecture.shared_field}
    known |= architecture.own_options
    known |= _READ_FIELDS_MOE if architecture.is_moe or architecture.has_own_code else set()
    for name, value in hf.items():
        if name in only:
            if value is not None and value != only[name]:
                raise ConfigError(f"config.json: {name}={value!r} is not supported; only {only[name]!r} is")
        elif name not in known and value is not None:
            raise ConfigError(
                f"config.json: {name}={value!r} is not supported for model_type {architecture.model_type!r}"
                + (f" ({UNSUPPORTED_FEATURES[name]})" if name in UNSUPPORTED_FEATURES else "")
            )
    if any(kind != "full_attention" for kind in hf.get("layer_types") or []):
        raise ConfigError(f"config.json: layer_types={hf['layer_types']!r} is not supported; only full_attention is")


# ---- RoPE


def _rope_parameters(c: ModelConfig) -> dict[str, Any]:
    """RoPE's part of config.json."""
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


def _rope_options(hf: dict[str, Any]) -> dict[str, Any]:
    """Our RoPE options. transformers >= 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
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


# ---- fields with their types checked: each raises ConfigError naming the field


def _number(hf: dict[str, Any], name: str, kind: type, default: float | None = None) -> Any:
    """The number in a field: a positive int, or a float. ``kind``: int or float."""
    value = hf.get(name, default)
    accepted = (int,) if kind is int else (int, float)
    if not isinstance(value, accepted) or isinstance(value, bool) or (kind is int and value < 1):
        raise ConfigError(f"config.json: {name}={value!r} must be a {'positive integer' if kind is int else 'number'}")
    return kind(value)


def _flag(hf: dict[str, Any], name: str) -> bool:
    """The truth value in a field that may be missing."""
    value = hf.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return value
