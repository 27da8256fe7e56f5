"""DeepSpeed's AutoTP for our decoder: which of its projections are split, and how.

An alternative to tensor.py for runs on DeepSpeed's own engine (ZeRO-3, offload; see deepspeed_ext/README.md). AutoTP
replaces nn.Linear layers by its own, all-reduces activations and has neither sequence parallelism nor a loss over a
split vocabulary nor split experts: experts, embedding and output projection stay whole on every rank.
"""

from __future__ import annotations

from typing import Any

from megatron.optimus.config.family import family_of
from megatron.optimus.config.schema import ConfigError, ModelConfig, QKNormScope

_ATTENTION = r".*\.attention\."


def autotp_section(config: ModelConfig, size: int) -> dict[str, Any]:
    """The section "tensor_parallel" of a DeepSpeed configuration.

    Heads are split as usual (query, key and value by columns, output by rows) unless QK-norm runs over all of them at
    once, as in Mula's MoE models: then all four projections are split by columns and their outputs gathered, so every
    weight is split and the attention itself runs on every rank.

    Args:
        config: the model.
        size: number of tensor-parallel ranks.

    Returns:
        The section as DeepSpeed reads it.

    Raises:
        ConfigError: for a size that does not divide what it splits.
    """
    if family_of(config).has_own_parts:
        raise ConfigError(f"autotp_size={size} does not know how to split model_family={config.model_family}")
    whole_norm = config.qk_layernorm and config.qk_layernorm_scope is not QKNormScope.HEAD
    split = {"num_attention_heads": config.num_attention_heads, "num_query_groups": config.num_kv_heads}
    if config.has_dense_layers:
        split["ffn_hidden_size"] = config.ffn_hidden_size
    if config.moe_shared_expert_intermediate_size:
        split["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
    for name, value in split.items():
        if value % size:
            raise ConfigError(f"autotp_size={size} must divide {name}={value}")
    if whole_norm:
        specs = [_spec("column", _ATTENTION + r"[qkvo]_proj\.weight$", gather_output=True)]
    else:
        specs = [
            _spec("column", _ATTENTION + r"[qkv]_proj\.weight$"),
            _spec("row", _ATTENTION + r"o_proj\.weight$"),
        ]
        if config.qk_layernorm:  # one weight for all heads; each rank has the gradient of its own heads
            specs.append(_spec("skip", _ATTENTION + r"[qk]_norm\.weight$", grad_allreduce=True))
    specs += [
        _spec("column", r".*\.mlp\.(gate|up)_proj\.weight$"),
        _spec("row", r".*\.mlp\.down_proj\.weight$"),
    ]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def _spec(kind: str, pattern: str, **options: bool) -> dict[str, Any]:
    return {"patterns": [pattern], "partition_type": kind, **options}
