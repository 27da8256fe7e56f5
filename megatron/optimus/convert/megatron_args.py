"""Translates Megatron's command-line arguments, as its checkpoints carry them, to our options and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.optimus.config.schema import (
    ConfigError,
    LoadBalancing,
    ModelConfig,
    Normalization,
    QKNormScope,
    RotaryScaling,
    ScoreFunction,
)
from megatron.optimus.convert.formats import Options, Source

# Arguments with one supported value; an argument that is absent has it.
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "apply_layernorm_1p": (False,),
    "multi_latent_attention": (False,),
    "moe_router_num_groups": (None, 0),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "num_layers_per_virtual_pipeline_stage": (None,),
    "virtual_pipeline_model_parallel_size": (None, 1),
}
_NUMBERS = {
    "num_layers": int,
    "hidden_size": int,
    "num_attention_heads": int,
    "ffn_hidden_size": int,
    "max_position_embeddings": int,
}
_OPTIONAL_NUMBERS = {
    "kv_channels": int,
    "rotary_base": float,
    "init_method_std": float,
    "moe_ffn_hidden_size": int,
    "moe_shared_expert_intermediate_size": int,
    "moe_router_topk": int,
    "moe_aux_loss_coeff": float,
    "moe_z_loss_coeff": float,
    "moe_router_bias_update_rate": float,
}
_NORMALIZATIONS = {
    "RMSNorm": Normalization.RMSNORM,
    "rmsnorm": Normalization.RMSNORM,  # Megatron-DeepSpeed
    "LayerNorm": Normalization.LAYERNORM_NONPARAMETRIC,  # the reader checks that its parameters are neutral
    "layernorm": Normalization.LAYERNORM_NONPARAMETRIC,
}
# Llama 3's constants are fixed in Megatron's --use-rope-scaling.
_LLAMA3 = {"rotary_low_freq_factor": 1.0, "rotary_high_freq_factor": 4.0, "rotary_original_positions": 8192}


def model_from_arguments(args: Mapping[str, Any]) -> ModelConfig:
    """Translates to our options. Raises ConfigError naming the argument that is missing or not supported."""
    for name, allowed in _CONSTANTS.items():
        if name in args and not any((args[name] == value) is True for value in allowed):  # a tensor's == is no bool
            raise ConfigError(f"{name}={args[name]!r} is not supported; only {allowed[0]!r} is")
    options: dict[str, Any] = {name: _number(args, name, kind) for name, kind in _NUMBERS.items()}
    options |= {
        name: _number(args, name, kind) for name, kind in _OPTIONAL_NUMBERS.items() if args.get(name) is not None
    }
    experts = args.get("num_experts") or 0
    experts = experts[0] if isinstance(experts, list) and len(set(experts)) == 1 else experts  # Megatron-DeepSpeed
    options["num_experts"] = _number({"num_experts": experts}, "num_experts", int, least=0)
    if options["num_experts"] == 1:  # Megatron-DeepSpeed's way to say dense
        options["num_experts"] = 0
    if args.get("group_query_attention") and args.get("num_query_groups") is not None:
        options["num_query_groups"] = _number(args, "num_query_groups", int)
    elif args.get("num_key_value_heads") is not None:  # Megatron-DeepSpeed
        options["num_query_groups"] = _number(args, "num_key_value_heads", int)
    size = "vocab_size" if args.get("vocab_size") is not None else "padded_vocab_size"
    options["vocab_size"] = _number(args, size, int)
    if args.get("normalization") not in _NORMALIZATIONS:
        raise ConfigError(f"normalization={args.get('normalization')!r} is not supported; only 'RMSNorm' is")
    options["normalization"] = _NORMALIZATIONS[args["normalization"]]
    epsilon = "norm_epsilon" if args.get("norm_epsilon") is not None else "layernorm_epsilon"
    options["norm_epsilon"] = _number(args, epsilon, float)
    options["add_qkv_bias"] = bool(args.get("add_qkv_bias", False))
    options["qk_layernorm"] = bool(args.get("qk_layernorm", False))
    options["qk_layernorm_scope"] = QKNormScope.HEAD
    options["untie_embeddings_and_output_weights"] = bool(args.get("untie_embeddings_and_output_weights", False))
    if args.get("use_rope_scaling"):
        options |= {"rotary_scaling": RotaryScaling.LLAMA3, **_LLAMA3}
        options["rotary_scaling_factor"] = (
            _number(args, "rope_scaling_factor", float) if (args.get("rope_scaling_factor") is not None) else 8.0
        )
    if options["num_experts"]:
        options |= _moe_options(args)
    return ModelConfig(**options)


def _moe_options(args: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    score = args.get("moe_router_score_function", "softmax")
    if score not in ("softmax", "sigmoid"):
        raise ConfigError(f"moe_router_score_function={score!r} is not supported; only softmax and sigmoid are")
    result["moe_router_score_function"] = ScoreFunction(score)
    # Without pre-softmax the scores are a softmax over the chosen experts alone: those over all, rescaled to one.
    topk = args.get("moe_router_topk", 2)
    result["moe_router_norm_topk_prob"] = (
        topk > 1 if score == "sigmoid" else not args.get("moe_router_pre_softmax", False)
    )
    result["moe_shared_expert_gate"] = bool(args.get("moe_shared_expert_gate", False))
    result["moe_router_enable_expert_bias"] = bool(args.get("moe_router_enable_expert_bias", False))
    balancing = args.get("moe_router_load_balancing_type", "aux_loss")
    known = {kind.value for kind in LoadBalancing}
    result["moe_router_load_balancing_type"] = LoadBalancing(balancing if balancing in known else "none")
    freq = args.get("moe_layer_freq")
    freq = [1] if freq is None else [freq] if isinstance(freq, int) else freq
    if not isinstance(freq, list) or any(type(one) is not int for one in freq):
        raise ConfigError(f"moe_layer_freq={freq!r} must be a number or a list of 0 and 1")
    result["moe_layer_freq"] = freq
    if args.get("moe_ffn_hidden_size") is None:
        result["moe_ffn_hidden_size"] = _number(args, "ffn_hidden_size", int)
    return result


def arguments_of(source: Source, options: Options, padded_vocab_size: int) -> dict[str, Any]:
    """Builds what Megatron reads with --use-checkpoint-args, in its types."""
    c = source.model
    dense_norm = c.normalization is Normalization.RMSNORM
    result: dict[str, Any] = {name: values[0] for name, values in _CONSTANTS.items()}
    result |= {name: getattr(c, name) for name in _NUMBERS}
    result |= {
        "kv_channels": c.head_dim,
        "group_query_attention": c.num_kv_heads != c.num_attention_heads,
        "num_query_groups": c.num_kv_heads,
        "vocab_size": c.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "make_vocab_size_divisible_by": 128,
        "seq_length": source.run.training.seq_length,
        "encoder_seq_length": source.run.training.seq_length,
        "normalization": "RMSNorm" if dense_norm else "LayerNorm",
        "norm_epsilon": c.norm_epsilon,
        "add_qkv_bias": c.add_qkv_bias,
        "qk_layernorm": c.qk_layernorm,
        "rotary_base": c.rotary_base,
        "use_rotary_position_embeddings": True,
        "use_rope_scaling": c.rotary_scaling is RotaryScaling.LLAMA3,
        "rope_scaling_factor": c.rotary_scaling_factor,
        "init_method_std": c.init_method_std,
        "untie_embeddings_and_output_weights": c.untie_embeddings_and_output_weights,
        "num_experts": c.num_experts or None,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "expert_model_parallel_size": options.ep,
        "consumed_train_samples": source.consumed_samples,
        "consumed_valid_samples": 0,
        "iteration": source.step,
        "params_dtype": source.run.training.params_dtype.value,
        "bf16": source.run.training.params_dtype.value == "bf16",
        "transformer_impl": "transformer_engine" if options.transformer_engine else "local",
    }
    if c.is_moe:
        result |= {
            "moe_ffn_hidden_size": c.moe_ffn_hidden_size,
            "moe_layer_freq": c.moe_layer_freq[0] if len(c.moe_layer_freq) == 1 else list(c.moe_layer_freq),
            "moe_shared_expert_intermediate_size": c.moe_shared_expert_intermediate_size or None,
            "moe_shared_expert_gate": c.moe_shared_expert_gate,
            "moe_router_topk": c.moe_router_topk,
            "moe_router_score_function": c.moe_router_score_function.value,
            "moe_router_pre_softmax": not c.moe_router_norm_topk_prob,
            "moe_router_load_balancing_type": c.moe_router_load_balancing_type.value,
            "moe_aux_loss_coeff": c.moe_aux_loss_coeff,
            "moe_z_loss_coeff": c.moe_z_loss_coeff or None,
            "moe_router_enable_expert_bias": c.moe_router_enable_expert_bias,
            "moe_router_bias_update_rate": c.moe_router_bias_update_rate,
            "moe_grouped_gemm": options.transformer_engine,
        }
    return result


def _number(args: Mapping[str, Any], name: str, kind: type, least: int = 1) -> Any:
    value = args.get(name)
    accepted = (int,) if kind is int else (int, float)
    if not isinstance(value, accepted) or isinstance(value, bool) or (kind is int and value < least):
        raise ConfigError(f"{name}={value!r} must be a {'positive integer' if kind is int else 'number'}")
    return kind(value)
