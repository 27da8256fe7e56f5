"""What inference servers compute otherwise than transformers, without an error, by architecture.

Read from the models' files of vLLM 0.33.0 and SGLang 0.5.23; other versions may differ. What is not listed was not
found to differ. What a server refuses with an error is not listed either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.optimus.config.schema import ModelConfig, RotaryScaling


@dataclass(frozen=True)
class Deviation:
    """Something that servers do not honour in a model of an architecture."""

    model_types: tuple[str, ...]
    servers: str
    concerns: Callable[[ModelConfig], bool]  # whether a model has it
    what: Callable[[ModelConfig], str]


_BOTH = "vLLM and SGLang"
DEVIATIONS = (
    Deviation(
        ("olmoe",),
        _BOTH,
        lambda c: c.norm_epsilon != 1e-5,
        lambda c: f"norm_epsilon={c.norm_epsilon}: every norm has 1e-05 there",
    ),
    Deviation(
        ("olmoe",),
        _BOTH,
        lambda c: c.moe_router_norm_topk_prob,
        lambda c: "moe_router_norm_topk_prob=True: weights of experts are not normalised there",
    ),
    Deviation(
        ("olmoe",),
        _BOTH,
        lambda c: c.clip_qkv is not None,
        lambda c: f"clip_qkv={c.clip_qkv}: queries, keys and values are not clipped there",
    ),
    Deviation(
        ("olmoe",),
        _BOTH,
        lambda c: not c.untie_embeddings_and_output_weights,
        lambda c: "tied embeddings: the output projection is a tensor of its own there and keeps its initial values",
    ),
    Deviation(
        ("olmoe",),
        "SGLang",
        lambda c: c.num_kv_heads != c.num_attention_heads,
        lambda c: f"num_query_groups={c.num_kv_heads}: the norm of keys has the width of all heads there",
    ),
    Deviation(
        ("olmo", "mixtral", "granitemoeshared"),
        "SGLang",
        lambda c: c.rotary_scaling is not RotaryScaling.NONE,
        lambda c: f"rotary_scaling={c.rotary_scaling.value}: RoPE is not scaled there",
    ),
    Deviation(
        ("mixtral", "granitemoeshared"),
        "SGLang",
        lambda c: c.rotary_base % 1 != 0,
        lambda c: f"rotary_base={c.rotary_base}: it is {int(c.rotary_base)} there",
    ),
    Deviation(
        ("mixtral", "qwen2_moe", "qwen3_moe"),
        "SGLang",
        lambda c: not c.untie_embeddings_and_output_weights,
        lambda c: "tied embeddings: the output projection is a tensor of its own there and keeps its initial values",
    ),
    Deviation(
        ("qwen2_moe", "qwen3_moe"),
        "SGLang",
        lambda c: c.has_dense_layers,
        lambda c: "moe_layer_freq: every layer has experts there, and those of dense layers keep their initial values",
    ),
    Deviation(
        ("olmo",),
        "SGLang",
        lambda c: c.num_kv_heads != c.num_attention_heads,
        lambda c: f"num_query_groups={c.num_kv_heads}: there are as many heads of keys as of queries there",
    ),
    Deviation(
        ("optimus",),
        _BOTH,
        lambda c: True,
        lambda c: "this architecture, they refuse it; transformers serves it",
    ),
)


def not_honoured(config: ModelConfig, model_type: str) -> list[str]:
    """What servers do not honour in an export, a line each.

    Args:
        config: the model.
        model_type: of the export's config.json.

    Returns:
        Lines such as "vLLM and SGLang do not honour clip_qkv=8.0: ...".
    """
    return [
        f"{one.servers} {'do' if one.servers == _BOTH else 'does'} not honour {one.what(config)}"
        for one in DEVIATIONS
        if model_type in one.model_types and one.concerns(config)
    ]
