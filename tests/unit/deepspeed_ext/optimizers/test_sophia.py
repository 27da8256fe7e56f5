"""Sophia against its definition in fp64, with the Gauss-Newton-Bartlett estimate of curvature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import own_optimizer
from tests.unit.deepspeed_ext.optimizers.oracles import (
    DECAY,
    FEWER_BITS,
    LR,
    SHAPES,
    STEPS,
    Cut,
    assert_close,
    check_fewer_bits,
    gradients,
    initial,
)


def test_sophia_equals_its_definition() -> None:
    """Algorithm 3 of the paper with the Gauss-Newton-Bartlett estimate, in fp64."""
    options: dict[str, Any] = {"betas": (0.96, 0.9), "gamma": 0.03, "eps": 1e-12}
    cut = Cut(own_optimizer("sophia")([torch.zeros(1)], lr=LR, weight_decay=DECAY, **options), 300, torch.bfloat16)
    theta = {name: value.double() for name, value in initial().items()}
    m, h = ({name: torch.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    clipped = 0.0
    for step in range(STEPS):
        if step % 4 == 0:
            cut.estimate({name: value * torch.nan for name, value in gradients(0).items()}, 32.0, skip=True)
            cut.estimate(gradients(50 + step), 32.0)
            for name, value in gradients(50 + step).items():
                h[name] = 0.9 * h[name] + 0.1 * 32 * value.double() ** 2
        cut.step(step + 1, gradients(step))
        for name, gradient in gradients(step).items():
            m[name] = 0.96 * m[name] + 0.04 * gradient.double()
            ratio = m[name] / (0.03 * h[name]).clamp(min=1e-12)
            clipped += (ratio.abs() > 1).double().mean().item() / STEPS / len(SHAPES)
            theta[name] = theta[name] * (1 - LR * DECAY) - LR * ratio.clamp(-1, 1)
    assert 0.1 < clipped < 0.9, "both sides of the clipping must occur"
    assert_close(cut.of("master"), {name: value.float() for name, value in theta.items()}, initial())


@FEWER_BITS
def test_states_in_fewer_bits_stay_near_and_a_skipped_step_changes_none(dtype: str, tolerance: float) -> None:
    check_fewer_bits("sophia", dtype, tolerance)


@pytest.mark.parametrize(("options", "message"), [({"lr": float("nan")}, "lr=nan must not be negative")])
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_optimizer("sophia")([torch.zeros(1)], **options)
