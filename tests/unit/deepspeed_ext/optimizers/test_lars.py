"""LARS after ten steps against another implementation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.deepspeed_ext.optimizers.oracles import (
    DECAY,
    FEWER_BITS,
    LR,
    check_against_oracle,
    check_fewer_bits,
)

library = pytest.importorskip("pytorch_optimizer")


def lars(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return library.LARS(params, lr=LR, weight_decay=DECAY, trust_coefficient=0.3)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("lars", lars, {"trust_coefficient": 0.3}, monkeypatch)


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("lars", dtype, tolerance)
