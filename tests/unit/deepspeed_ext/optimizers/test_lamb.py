"""LAMB after ten steps against another implementation, and its bias correction by the paper."""

from __future__ import annotations

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


def lamb(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return library.Lamb(params, lr=LR, betas=B2, weight_decay=DECAY, weight_decouple=False, adam_debias=True)


def test_weights_equal_the_oracle_alone_and_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_oracle("lamb", lamb, {"betas": B2, "correct_bias": False}, monkeypatch)


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("lamb", dtype, tolerance)


def test_lamb_corrects_the_bias_as_the_paper_says() -> None:
    weight, grad = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    param = nn.Parameter(weight.float())
    param.grad = grad.float()
    own_optimizer("lamb")([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2, eps=1e-6).step()
    direction = grad / (grad.abs() + 1e-6) + 0.2 * weight
    wanted = weight - 0.1 * weight.norm() / (direction.norm() + 1e-6) * direction
    torch.testing.assert_close(param.detach().double(), wanted, rtol=1e-5, atol=1e-6)
