"""Cautious AdamW after ten steps against cautious AdEMAMix without its slow momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.deepspeed_ext.optimizers.oracles import (
    B2,
    B3,
    DECAY,
    FEWER_BITS,
    LR,
    check_against_oracle,
    check_fewer_bits,
)

library = pytest.importorskip("pytorch_optimizer")


def cautious(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdEMAMix without its slow momentum is AdamW."""
    decoupled: dict[str, Any] = {"weight_decay": DECAY, "weight_decouple": True}
    return library.AdEMAMix(params, lr=LR, betas=B3, alpha=0.0, cautious=True, **decoupled)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("cautious-adamw", cautious, {"betas": B2}, monkeypatch)


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("cautious-adamw", dtype, tolerance)
