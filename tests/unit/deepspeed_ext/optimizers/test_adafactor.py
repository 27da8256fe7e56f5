"""Adafactor after ten steps against torch.optim.Adafactor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.deepspeed_ext.optimizers.oracles import (
    DECAY,
    LR,
    check_against_oracle,
)


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.3, weight_decay=DECAY * LR / 0.3)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("adafactor", adafactor, {"lr": 0.3, "weight_decay": DECAY * LR / 0.3}, monkeypatch)
