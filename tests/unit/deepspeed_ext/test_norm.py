"""Partial norms and the clip coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_ext.zero.norm import clip_coefficient, sum_of_squares


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 100_003])
def test_sum_of_squares(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert sum_of_squares(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 4999])
def test_non_finite_shows(bad: float, position: int) -> None:
    x = torch.ones(5000)
    x[position] = bad
    assert not math.isfinite(sum_of_squares(x).item())


def test_a_long_constant_does_not_stall() -> None:
    """One fp32 accumulator stops growing at 2^24 equal addends."""
    x = torch.full((2**25,), 1.0)
    assert sum_of_squares(x).item() == pytest.approx(2**25, rel=1e-6)


def test_clip_coefficient() -> None:
    assert clip_coefficient(5.0, 0.0) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(1.0 / (4.0 + 1e-6))
