"""Trains one parameter by an optimizer for matrices, and compares where it ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

STEPS = 10


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(build: Callable[[nn.Parameter], torch.optim.Optimizer], shape: tuple[int, ...]) -> Tensor:
    """The weights after ten steps."""
    param = nn.Parameter(values(shape, 0))
    optimizer = build(param)
    for step in range(1, STEPS + 1):
        param.grad = values(shape, step)
        optimizer.step()
    return param.detach()


def assert_alike(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    moved = (expected - values(tuple(expected.shape), 0)).abs().max()
    assert moved > 1e-3 and (actual - expected).abs().max() < tolerance * moved
