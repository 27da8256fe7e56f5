"""Checks of the options that belong to one optimizer: those of another one, and what an optimizer cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron.optimus.config.choices import (
    OPTIMIZER_LIBRARY,
    KernelLibrary,
    LRDecayStyle,
    OptimizerName,
    OptimizerStateDtype,
)
from megatron.optimus.config.values import require

if TYPE_CHECKING:
    from megatron.optimus.config.schema import OptimizerConfig

# Options whose name begins so are read by these optimizers. AdamW's (adam_) are read by many, and presets set them.
_READ_BY: Mapping[str, tuple[OptimizerName, ...]] = {
    "schedule_free_": (OptimizerName.SCHEDULE_FREE_ADAMW, OptimizerName.SCHEDULE_FREE_SGD),
    "qk_clip_": (OptimizerName.MUON, OptimizerName.NORMUON),
    "muon_": tuple(name for name in OptimizerName if name.is_for_matrices),
    **{
        f"{name.value}_": (name,)
        for name in OptimizerName
        if name.value.isidentifier() and name not in (OptimizerName.ADAM, OptimizerName.MUON)
    },
}


def _owners(option: str) -> tuple[OptimizerName, ...] | None:
    """The optimizers that read an option; None: all."""
    return next((names for prefix, names in _READ_BY.items() if option.startswith(prefix)), None)


def is_of_another(option: str, chosen: OptimizerName) -> bool:
    """Whether an option is one that the chosen optimizer does not read."""
    owners = _owners(option)
    return owners is not None and chosen not in owners


def check_optimizer_options(config: OptimizerConfig) -> None:
    """Raises ConfigError for options of another optimizer, and for what the chosen one cannot do or lacks."""
    chosen = config.optimizer
    for field in fields(config):
        owners = _owners(field.name)
        value = getattr(config, field.name)
        if owners is not None and chosen not in owners:
            words = " or ".join(name.value for name in owners)
            require(
                value == field.default,
                f"{field.name}={value} is an option of {words}, and this run has optimizer={chosen.value}; leave it "
                f"out, or use optimizer={owners[0].value}",
            )
    _check_library(config)
    if chosen.is_schedule_free:
        _check_schedule_free(config)
    if config.optimizer_backend is KernelLibrary.APEX:
        _check_apex(config)
    if chosen is OptimizerName.SOPHIA:
        require(
            config.sophia_interval is not None,
            "optimizer=sophia needs sophia_interval, the steps between two estimates of the Hessian; 10 is usual",
        )
    if chosen.is_schedule_free or chosen.is_of_library or chosen is OptimizerName.ADAFACTOR:
        dtype = config.optimizer_state_dtype
        require(
            dtype is OptimizerStateDtype.FP32,
            f"optimizer={chosen.value} keeps its states in fp32, not optimizer_state_dtype={dtype.value}; leave it out",
        )


def check_ema(config: OptimizerConfig) -> None:
    """Raises ConfigError for a moving average of the weights that cannot be, or options of one that is not kept."""
    decay = config.ema_decay
    if decay is None:
        for name, default in (("ema_interval", 1), ("evaluate_ema", False)):
            value = getattr(config, name)
            require(value == default, f"{name}={value} is for a moving average; set ema_decay, or leave it out")
        return
    require(0 < decay < 1, f"ema_decay={decay} is out of range; use 0 < ema_decay < 1, such as 0.999")
    require(
        not config.optimizer.is_schedule_free,
        f"optimizer={config.optimizer.value} keeps an average of its own, which is evaluated and saved; leave out "
        f"ema_decay={decay}",
    )
    require(config.zero_stage < 3, f"ema_decay={decay} needs zero_stage=1 or 2, this run has zero_stage=3")


def _check_apex(config: OptimizerConfig) -> None:
    """FusedAdam is AdamW with states in fp32, and runs on shards of our own sharded optimizer."""
    dtype, needs = config.optimizer_state_dtype, "its FusedAdam needs"
    limits = [
        (config.optimizer is OptimizerName.ADAM, f"optimizer={config.optimizer.value}: {needs} adam"),
        (dtype is OptimizerStateDtype.FP32, f"optimizer_state_dtype={dtype.value}: {needs} fp32"),
        (config.zero_stage < 3, f"zero_stage={config.zero_stage}: {needs} 2 or less"),
    ]
    for fits, words in limits:
        require(fits, f"optimizer_backend=apex with {words}, or use optimizer_backend=optimus")


def _check_schedule_free(config: OptimizerConfig) -> None:
    schedule: dict[str, Any] = {
        "lr_warmup_iters": config.lr_warmup_iters,
        "lr_warmup_samples": config.lr_warmup_samples,
    }
    given = [f"{name}={value}" for name, value in schedule.items() if value]
    if config.lr_decay_style is not LRDecayStyle.CONSTANT:
        given.insert(0, f"lr_decay_style={config.lr_decay_style.value}")
    require(
        not given,
        f"optimizer={config.optimizer.value} has no learning-rate schedule, but {', '.join(given)}; use "
        "lr_decay_style=constant without warm-up; schedule_free_warmup_iters is its own",
    )


def _check_library(config: OptimizerConfig) -> None:
    require(
        config.optimizer is not OptimizerName.LIBRARY,
        f"optimizer={config.optimizer.value}: NAME is a class of that package, such as {OPTIMIZER_LIBRARY}AdaBelief",
    )
    words = config.optimizer_options
    require(
        config.optimizer.is_of_library or not words,
        f"optimizer_options={' '.join(words)} is for optimizer={OptimizerName.LIBRARY.value}, and this run has "
        f"optimizer={config.optimizer.value}; leave it out",
    )
    for word in words:
        require("=" in word[1:], f"optimizer_options: {word!r} is not NAME=VALUE, such as eps=1e-6")
