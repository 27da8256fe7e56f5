"""AdEMAMix after ten steps against another implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import own_optimizer
from tests.unit.deepspeed_ext.optimizers.oracles import (
    B3,
    DECAY,
    FEWER_BITS,
    LR,
    check_against_oracle,
    check_fewer_bits,
)

library = pytest.importorskip("pytorch_optimizer")


def ademamix(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    decoupled: dict[str, Any] = {"weight_decay": DECAY, "weight_decouple": True}
    return library.AdEMAMix(params, lr=LR, betas=B3, alpha=4.0, t_alpha_beta3=6, **decoupled)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("ademamix", ademamix, {"betas": B3, "alpha": 4.0, "warmup_iters": 6}, monkeypatch)


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("ademamix", dtype, tolerance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha=-1.0 must not be negative"),
        ({"betas": (0.0, 0.9, 0.99), "warmup_iters": 5}, "warmup_iters=5 needs betas"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_optimizer("ademamix")([torch.zeros(1)], **options)
