"""Our tensors and configuration in Hugging Face's terms (OLMo for dense models, OLMoE for MoE), and back.

Hugging Face files hold one matrix per expert and projection; we hold all experts of a layer in one tensor. In memory
order every such matrix is one contiguous range of our flattened tensor, so a mapping is a list of ranges and both
directions are exact copies.

Sources: transformers' OlmoConfig/OlmoForCausalLM and OlmoeConfig/OlmoeForCausalLM. OLMo's norms have no weights and no
settable epsilon; OLMoE always has RMSNorm and QK-norm over the full width. What neither expresses is refused by name.

Shapes: V vocabulary, D hidden, F inner width (of one expert in MoE layers), E experts, H query heads, K kv heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.optimus.config.schema import ConfigError, ModelConfig, Normalization, ScoreFunction

_OLMO_NORM_EPSILON = 1e-5  # fixed in OlmoLayerNorm
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
    "clip_qkv",
}
_READ_FIELDS_MOE = {"rms_norm_eps", "num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef"}
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
    "_name_or_path",
    "_attn_implementation_autoset",
}


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: elements [start, start + product of shape) of one of our flattened tensors."""

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and global shapes of all our parameters, in model order."""
    c = config
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
    has_norm_weights = c.normalization is Normalization.RMSNORM
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        prefix = f"layers.{layer}."
        if has_norm_weights:
            shapes[prefix + "attention_norm.weight"] = (c.hidden_size,)
        shapes[prefix + "attention.q_proj.weight"] = (width, c.hidden_size)
        shapes[prefix + "attention.k_proj.weight"] = (kv_width, c.hidden_size)
        shapes[prefix + "attention.v_proj.weight"] = (kv_width, c.hidden_size)
        shapes[prefix + "attention.o_proj.weight"] = (c.hidden_size, width)
        if c.qk_layernorm:
            shapes[prefix + "attention.q_norm.weight"] = (width,)
            shapes[prefix + "attention.k_norm.weight"] = (kv_width,)
        if has_norm_weights:
            shapes[prefix + "mlp_norm.weight"] = (c.hidden_size,)
        if c.is_moe:
            inner = c.moe_ffn_hidden_size
            shapes[prefix + "moe.router.weight"] = (c.num_experts, c.hidden_size)
            shapes[prefix + "moe.experts.gate_up_weight"] = (c.num_experts, 2 * inner, c.hidden_size)
            shapes[prefix + "moe.experts.down_weight"] = (c.num_experts, c.hidden_size, inner)
        else:
            shapes[prefix + "mlp.gate_proj.weight"] = (c.ffn_hidden_size, c.hidden_size)
            shapes[prefix + "mlp.up_proj.weight"] = (c.ffn_hidden_size, c.hidden_size)
            shapes[prefix + "mlp.down_proj.weight"] = (c.hidden_size, c.ffn_hidden_size)
    if has_norm_weights:
        shapes["final_norm.weight"] = (c.hidden_size,)
    if c.untie_embeddings_and_output_weights:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


_TOP_LEVEL = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "moe.router.weight": "mlp.gate.weight",
}


def to_hf(config: ModelConfig, name: str) -> list[HFTensor]:
    """The Hugging Face tensors that together are our tensor ``name``, in the order of their ranges.

    Raises KeyError when the model has no parameter of that name.
    """
    shape = parameter_shapes(config)[name]
    if name in _TOP_LEVEL:
        return [HFTensor(_TOP_LEVEL[name], shape)]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest in _IN_LAYER:
        return [HFTensor(prefix + _IN_LAYER[rest], shape)]
    width, inner = config.hidden_size, config.moe_ffn_hidden_size
    if rest == "moe.experts.gate_up_weight":  # rows 0 ... F-1 of each expert: gate, F ... 2F-1: up
        halves = [(expert, half) for expert in range(config.num_experts) for half in (0, 1)]
        return [
            HFTensor(
                f"{prefix}mlp.experts.{expert}.{('gate', 'up')[half]}_proj.weight",
                (inner, width),
                (2 * expert + half) * inner * width,
            )
            for expert, half in halves
        ]
    return [
        HFTensor(f"{prefix}mlp.experts.{expert}.down_proj.weight", (width, inner), expert * inner * width)
        for expert in range(config.num_experts)
    ]


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json: OlmoeForCausalLM with experts, OlmoForCausalLM without.

    ``dtype``: torch's name, such as "bfloat16". Token ids are null: the caller knows the tokenizer. Raises ConfigError
    naming the option that neither architecture can express.
    """
    _check_expressible(config)
    c = config
    result: dict[str, Any] = {
        "architectures": ["OlmoeForCausalLM" if c.is_moe else "OlmoForCausalLM"],
        "model_type": "olmoe" if c.is_moe else "olmo",
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
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},  # transformers >= 5 reads this one
        "clip_qkv": c.clip_qkv,
        # Explicit: the architectures' own defaults name tokens that this vocabulary may not have.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,
        **_SAME_IN_EVERY_MODEL,
    }
    if c.is_moe:
        result |= {
            "rms_norm_eps": c.norm_epsilon,
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.moe_router_topk,
            "norm_topk_prob": c.moe_router_norm_topk_prob,
            "router_aux_loss_coef": c.moe_aux_loss_coeff,
            "output_router_logits": False,
        }
    return result


def model_config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Our options for a Hugging Face config.json of model_type "olmo" or "olmoe".

    Raises ConfigError naming the first field that is missing, of the wrong type, or not supported.
    """
    model_type = hf.get("model_type")
    if model_type not in ("olmo", "olmoe"):
        raise ConfigError(f"config.json: model_type={model_type!r} is not supported; use 'olmo' or 'olmoe'")
    is_moe = model_type == "olmoe"
    known = _READ_FIELDS | _BOOKKEEPING_FIELDS | _SAME_IN_EVERY_MODEL.keys() | (_READ_FIELDS_MOE if is_moe else set())
    for name, value in hf.items():
        if name not in known and value is not None:
            raise ConfigError(f"config.json: {name}={value!r} is not supported for model_type {model_type!r}")
        if name in _SAME_IN_EVERY_MODEL and value != _SAME_IN_EVERY_MODEL[name]:
            raise ConfigError(f"config.json: {name}={value!r} is not supported; only {_SAME_IN_EVERY_MODEL[name]!r} is")
    heads = _number(hf, "num_attention_heads", int)
    clip = hf.get("clip_qkv")
    options: dict[str, Any] = {
        "num_layers": _number(hf, "num_hidden_layers", int),
        "hidden_size": _number(hf, "hidden_size", int),
        "num_attention_heads": heads,
        "num_query_groups": heads if hf.get("num_key_value_heads") is None else _number(hf, "num_key_value_heads", int),
        "vocab_size": _number(hf, "vocab_size", int),
        "max_position_embeddings": _number(hf, "max_position_embeddings", int, 4096 if is_moe else 2048),
        "init_method_std": _number(hf, "initializer_range", float, 0.02),
        "untie_embeddings_and_output_weights": not _flag(hf, "tie_word_embeddings"),
        "rotary_base": _rope_theta(hf),
        "clip_qkv": None if clip is None else _number(hf, "clip_qkv", float),
    }
    if hf.get("head_dim") is not None and hf["head_dim"] * heads != options["hidden_size"]:
        raise ConfigError(f"config.json: head_dim={hf['head_dim']!r} must be hidden_size / num_attention_heads")
    if not is_moe:
        return ModelConfig(
            **options,
            ffn_hidden_size=_number(hf, "intermediate_size", int),
            normalization=Normalization.LAYERNORM_NONPARAMETRIC,
            norm_epsilon=_OLMO_NORM_EPSILON,
            qk_layernorm=False,
            num_experts=0,
        )
    return ModelConfig(
        **options,
        moe_ffn_hidden_size=_number(hf, "intermediate_size", int),
        normalization=Normalization.RMSNORM,
        norm_epsilon=_number(hf, "rms_norm_eps", float, 1e-5),
        qk_layernorm=True,
        num_experts=_number(hf, "num_experts", int, 64),
        moe_router_topk=_number(hf, "num_experts_per_tok", int, 8),
        moe_router_norm_topk_prob=_flag(hf, "norm_topk_prob"),
        moe_aux_loss_coeff=_number(hf, "router_aux_loss_coef", float, 0.01),
    )


def _check_expressible(c: ModelConfig) -> None:
    def refuse(option: str, value: Any, needed: str) -> None:
        raise ConfigError(f"{option}={value} has no equivalent in Hugging Face's {model}, which needs {needed}")

    model = "OLMoE" if c.is_moe else "OLMo (the dense architecture)"
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        refuse(
            "kv_channels", c.kv_channels, f"hidden_size / num_attention_heads = {c.hidden_size}/{c.num_attention_heads}"
        )
    if c.is_moe:
        if c.normalization is not Normalization.RMSNORM:
            refuse("normalization", c.normalization.value, Normalization.RMSNORM.value)
        if not c.qk_layernorm:
            refuse("qk_layernorm", False, "True")
        if c.moe_router_score_function is not ScoreFunction.SOFTMAX:
            refuse("moe_router_score_function", c.moe_router_score_function.value, ScoreFunction.SOFTMAX.value)
        if c.moe_router_force_load_balancing:
            refuse("moe_router_force_load_balancing", True, "False")
        return
    if c.normalization is not Normalization.LAYERNORM_NONPARAMETRIC:
        refuse("normalization", c.normalization.value, Normalization.LAYERNORM_NONPARAMETRIC.value)
    if c.qk_layernorm:
        refuse("qk_layernorm", True, "False")
    if c.norm_epsilon != _OLMO_NORM_EPSILON:
        refuse("norm_epsilon", c.norm_epsilon, str(_OLMO_NORM_EPSILON))


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


def _rope_theta(hf: dict[str, Any]) -> float:
    """transformers >= 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
    theta = _number(hf, "rope_theta", float, 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ConfigError(f"config.json: {name}={rope!r} must be an object")
        if set(rope) - {"rope_type", "type", "rope_theta"} or rope.get("rope_type", rope.get("type")) != "default":
            raise ConfigError(f"config.json: {name}={rope!r} is not supported; only plain RoPE ('default') is")
        theta = _number(rope, "rope_theta", float, theta)
    return theta
