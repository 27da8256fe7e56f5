"""RoPE in the words of Hugging Face's config.json, and back."""

from __future__ import annotations

from typing import Any

from megatron.optimus.config.schema import ConfigError, ModelConfig, RotaryScaling, one_of
from megatron.optimus.models.hf_values import number


def rope_parameters(c: ModelConfig) -> dict[str, Any]:
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


ROPE_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def rope_options(hf: dict[str, Any]) -> dict[str, Any]:
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
        fields = ROPE_FIELDS.get(kind) if isinstance(kind, str) else None
        found = {key for key, value in rope.items() if value is not None} - {"rope_type", "type", "rope_theta"}
        if fields is None or found != fields:
            raise ConfigError(
                f"config.json: {name}={rope!r} is not supported; supported are the rope_types "
                f"{one_of(f'{key!r} with {sorted(value)}' for key, value in ROPE_FIELDS.items())}"
            )
        theta = rope.get("rope_theta") or theta
        options["rotary_scaling"] = RotaryScaling.NONE if kind == "default" else RotaryScaling(kind)
        if kind != "default":
            options["rotary_scaling_factor"] = number(rope, "factor", float)
        if kind == "llama3":
            options["rotary_low_freq_factor"] = number(rope, "low_freq_factor", float)
            options["rotary_high_freq_factor"] = number(rope, "high_freq_factor", float)
            options["rotary_original_positions"] = number(rope, "original_max_position_embeddings", int)
    return {"rotary_base": number({"rope_theta": theta}, "rope_theta", float), **options}
