"""Learning rate: ends of warm-up and decay, and what lies beyond."""

from __future__ import annotations

import pytest

from megatron.optimus.config.schema import LRDecayStyle, OptimizerConfig
from megatron.optimus.optim.schedule import learning_rate


def config(style: LRDecayStyle, **changes: object) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "lr_decay_style": style, **changes})


@pytest.mark.parametrize("style", list(LRDecayStyle))
def test_warmup_reaches_the_peak_and_decay_the_minimum(style: LRDecayStyle) -> None:
    rates = [learning_rate(step, config(style), 100) for step in range(130)]
    assert rates[0] == pytest.approx(0.1 + 0.9 / 10)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[:10] == sorted(set(rates[:10]))
    if style is LRDecayStyle.CONSTANT:
        assert set(rates[10:]) == {1.0}
    else:
        assert rates[55] == pytest.approx(0.55)
        assert rates[100] == rates[129] == pytest.approx(0.1)


def test_horizon_may_differ_from_the_number_of_steps() -> None:
    assert learning_rate(50, config(LRDecayStyle.LINEAR, lr_decay_iters=50), 100) == pytest.approx(0.1)


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0, config(LRDecayStyle.COSINE, lr_warmup_iters=0), 100) == 1.0
