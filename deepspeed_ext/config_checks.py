"""Checks of the types and ranges of values in a DeepSpeed configuration, before anything is built."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

_OF_DEFAULTS = ("zero_optimization", "fp16", "bf16", "bfloat16")
_SECTIONS = (
    *("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "deepspeed_ext", "data_types"),
    *("torch_autocast", "checkpoint", "timers", "tensor_parallel", "expert_parallel", "hybrid_engine", "compile"),
)


def check_kinds(config: Mapping[str, Any]) -> None:
    """Checks that sections are objects and the ZeRO stage is 0, 1, 2 or 3; raises ValueError."""
    for name in _SECTIONS:
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise ValueError(f'{name}={section!r} must be an object, such as {{"{_example(name)}}}')
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ValueError(f"zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration without values "auto" where DeepSpeed itself takes its default instead.

    That is so in the sections of ZeRO and precision. Their keys "stage" and "enabled" stay: a default would turn off,
    without a word, what somebody wanted to be chosen.
    """
    taken = {name: config[name] for name in _OF_DEFAULTS if isinstance(config.get(name), Mapping)}
    return {**config, **{name: _without_auto(section) for name, section in taken.items()}}


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in section.items() if value != "auto" or key in ("stage", "enabled")}
    return {key: _without_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def refuse_auto(config: Mapping[str, Any]) -> None:
    """Raises ValueError for values "auto", which only the Trainer of transformers replaces.

    See ``without_auto`` for those that DeepSpeed replaces. It would silently read some of the others as "off".
    """
    found = sorted(_autos({key: value for key, value in config.items() if key not in ("autotuning", "pipeline")}))
    if found:
        raise ValueError(f'{", ".join(found)}: "auto" is filled in by the Trainer of transformers only; give a value')


def _autos(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = [f"{prefix}{key}" for key, value in config.items() if value == "auto"]
    inner = [(key, value) for key, value in config.items() if isinstance(value, Mapping)]
    return keys + [found for key, value in inner for found in _autos(value, f"{prefix}{key}.")]


def _example(section: str) -> str:
    examples = {"zero_optimization": 'stage": 1', "optimizer": 'type": "AdamW"', "scheduler": 'type": "WarmupLR"'}
    examples |= {"data_types": 'grad_accum_dtype": "fp32"', "deepspeed_ext": 'overlap_param_gather": true'}
    examples |= {"tensor_parallel": 'autotp_size": 2', "checkpoint": 'load_universal": true'}
    return examples.get(section, 'enabled": true')


def number(key: str, value: Any) -> float:
    """Returns ``value`` as a float. Raises ValueError for anything but a finite number, also for text like "0.1"."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{key}={value!r} must be a number")
    return float(value)


def own_section(section: Mapping[str, Any], defaults: Mapping[str, bool | int]) -> dict[str, Any]:
    """Returns the section "deepspeed_ext". Raises ValueError for an unknown key or a value of the wrong type.

    Args:
        section: as configured.
        defaults: every known key with its default, whose type values must have.
    """
    for key, value in section.items():
        if key not in defaults:
            near = difflib.get_close_matches(str(key), defaults, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(defaults))}"
            raise ValueError(f"deepspeed_ext.{key} is not an option; {hint}")
        kind = type(defaults[key])
        if type(value) is not kind:
            expected = "true or false" if kind is bool else "a whole number"
            raise ValueError(f"deepspeed_ext.{key}={value!r} must be {expected}")
    return dict(section)


def optimizer_params(params: Any) -> dict[str, Any]:
    """Returns the options in "optimizer": {"params": ...}; raises ValueError for text, or betas that are no pair."""
    if not isinstance(params, Mapping):
        raise ValueError(f'optimizer.params={params!r} must be an object, such as {{"lr": 1e-4}}')
    for key in params.keys() & {"lr", "eps", "weight_decay", "momentum", "dampening"}:
        number(f"optimizer.params.{key}", params[key])
    betas = params.get("betas", (0.9, 0.999))
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"optimizer.params.betas={betas!r} must be two numbers")
    for beta in betas:
        if not 0 <= number("optimizer.params.betas", beta) < 1:
            raise ValueError(f"optimizer.params.betas={betas!r} are out of range; use 0 <= beta < 1")
    return dict(params)


def in_one_line(error: Exception) -> str:
    """Formats an error as one line: its message, preceded by its class unless that is ValueError or AssertionError.

    The list of errors that pydantic raises becomes one line too.
    """
    if callable(listed := getattr(error, "errors", None)):
        wrong = [(".".join(map(str, entry["loc"])), entry["msg"], entry["input"]) for entry in listed()]
        return f"{error.title}: " + "; ".join(f"{where}={value!r}: {text}" for where, text, value in wrong)  # type: ignore[attr-defined]
    text = " ".join(str(error).split())
    return text if isinstance(error, (ValueError, AssertionError)) and text else f"{type(error).__name__}: {text}"
