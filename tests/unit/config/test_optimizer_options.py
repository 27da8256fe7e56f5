"""Options that belong to one optimizer: those of another one are refused, and what the chosen one cannot do."""

from typing import Any

import pytest

from megatron.optimus.config.choices import KernelLibrary
from megatron.optimus.config.choices import OptimizerName as NAME
from megatron.optimus.config.optimizer_options import is_of_another
from megatron.optimus.config.schema import ConfigError, LRDecayStyle, OptimizerConfig, OptimizerStateDtype

CONSTANT = {"lr_decay_style": LRDecayStyle.CONSTANT}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"lars_momentum": 0.5},
            ["lars_momentum=0.5 is an option of lars", "=adam; leave"],
        ),
        ({"lion_beta1": 0.5, "optimizer": NAME.SGD}, ["lion_beta1=0.5", "option of lion", "=sgd"]),
        ({"schedule_free_beta": 0.8}, ["option of schedule-free-adamw or schedule-free-sgd"]),
        ({"evaluate_ema": True}, ["evaluate_ema=True is for a moving average; set ema_decay"]),
        ({"ema_interval": 2}, ["ema_interval=2 is for a moving average"]),
        ({"ema_decay": 1.0}, ["ema_decay=1.0 is out of range", "0.999"]),
        ({"ema_decay": 0.9, "zero_stage": 3}, ["ema_decay=0.9 needs zero_stage=1 or 2"]),
        (
            {"ema_decay": 0.9, "optimizer": NAME.SCHEDULE_FREE_SGD} | CONSTANT,
            ["optimizer=schedule-free-sgd keeps an average of its own"],
        ),
        ({"sophia_interval": 10}, ["sophia_interval=10 is an option of sophia"]),
        ({"qk_clip_threshold": 9.0}, ["qk_clip_threshold=9.0 is an option of muon or normuon"]),
        ({"optimizer_options": ["eps=1"]}, ["optimizer_options=eps=1 is for", "optimizer=adam"]),
        ({"optimizer": NAME.SOPHIA}, ["optimizer=sophia needs sophia_interval", "10 is usual"]),
        ({"optimizer": NAME.LIBRARY}, ["pytorch_optimizer:NAME: NAME is a class", "AdaBelief"]),
        (
            {"optimizer": NAME("pytorch_optimizer:Tiger"), "optimizer_options": ["beta"]},
            ["'beta' is not NAME=VALUE"],
        ),
        (
            {"optimizer": NAME("pytorch_optimizer:Tiger"), "optimizer_state_dtype": OptimizerStateDtype.INT8},
            ["optimizer=pytorch_optimizer:Tiger keeps its states in fp32", "optimizer_state_dtype=int8"],
        ),
        (
            {"optimizer": NAME.SCHEDULE_FREE_SGD, "lr_warmup_iters": 5},
            ["no learning-rate schedule", "lr_decay_style=cosine, lr_warmup_iters=5", "schedule_free_warmup_iters"],
        ),
        (
            CONSTANT | {"optimizer": NAME.SCHEDULE_FREE_ADAMW, "optimizer_state_dtype": OptimizerStateDtype.BF16},
            ["keeps its states in fp32", "optimizer_state_dtype=bf16"],
        ),
    ],
)
def test_impossible_values(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        OptimizerConfig(**values)
    for part in parts:
        assert part in str(info.value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"optimizer": NAME.LION}, "optimizer=lion: its FusedAdam needs adam"),
        ({"optimizer_state_dtype": OptimizerStateDtype.BF16}, "optimizer_state_dtype=bf16: its FusedAdam needs fp32"),
        ({"zero_stage": 3}, "zero_stage=3: its FusedAdam needs 2 or less"),
    ],
)
def test_what_apex_cannot_do(values: dict[str, Any], part: str) -> None:
    OptimizerConfig(optimizer_backend=KernelLibrary.APEX)
    with pytest.raises(ConfigError, match=f"{part}, or use optimizer_backend=optimus"):
        OptimizerConfig(optimizer_backend=KernelLibrary.APEX, **values)


def test_who_reads_an_option() -> None:
    """AdamW's are read by many; Muon's by all optimizers for matrices."""
    readers = {
        "adam_beta1": set(NAME),
        "lr": set(NAME),
        "lion_beta1": {NAME.LION},
        "qk_clip_threshold": {NAME.MUON, NAME.NORMUON},
        "schedule_free_beta": {NAME.SCHEDULE_FREE_ADAMW, NAME.SCHEDULE_FREE_SGD},
        "muon_momentum": {NAME.MUON, NAME.NORMUON, NAME.SOAP, NAME.SHAMPOO, NAME.GALORE, NAME.DION},
    }
    for option, expected in readers.items():
        assert {name for name in NAME if not is_of_another(option, name)} == expected, option
