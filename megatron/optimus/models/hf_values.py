"""Values of a Hugging Face config.json, with their types checked. Each raises ConfigError naming the field."""

from __future__ import annotations

from typing import Any

from megatron.optimus.config.schema import ConfigError


def number(hf: dict[str, Any], name: str, kind: type, default: float | None = None) -> Any:
    """``kind`` is int, then positive, or float."""
    value = hf.get(name, default)
    accepted = (int,) if kind is int else (int, float)
    if not isinstance(value, accepted) or isinstance(value, bool) or (kind is int and value < 1):
        raise ConfigError(f"config.json: {name}={value!r} must be a {'positive integer' if kind is int else 'number'}")
    return kind(value)


def flag(hf: dict[str, Any], name: str) -> bool:
    value = hf.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return value
