"""ADOPT after ten steps against another implementation, which decays nothing in its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import own_optimizer
from tests.unit.deepspeed_ext.optimizers.oracles import (
    B2,
    DECAY,
    FEWER_BITS,
    LR,
    check_against_oracle,
    check_fewer_bits,
)

library = pytest.importorskip("pytorch_optimizer")


def adopt(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As the authors' code: the first step decays nothing, and the t-th update is clipped to t^(1/4)."""
    for param in params:
        param.data /= 1 - LR * DECAY
    clip = lambda step: (step - 1) ** 0.25  # noqa: E731
    return library.ADOPT(params, lr=LR, betas=B2, weight_decay=DECAY, weight_decouple=True, clip_lambda=clip)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("adopt", adopt, {"betas": B2}, monkeypatch)


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("adopt", dtype, tolerance)


@pytest.mark.parametrize(("options", "message"), [({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) are out of range")])
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_optimizer("adopt")([torch.zeros(1)], **options)
