"""What a curve of losses over rising rates says, and the words of `optimus lr-find`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron.optimus.commands import lr_find
from megatron.optimus.commands.lr_find import suggest
from megatron.optimus.config.schema import ConfigError, LRDecayStyle, OptimizerConfig, TrainingConfig
from megatron.optimus.training.lr_schedule import RateSchedule

RATES = np.geomspace(1e-6, 1.0, 121)


def curve(steepest: float, lowest: float, noise: float = 0.0) -> np.ndarray:
    """Falls from 6 to 3 around one rate, and explodes behind another."""
    x = np.log(RATES)
    fall = 3.0 / (1 + np.exp(2 * (x - math.log(steepest))))
    rise = np.maximum(0, x - math.log(lowest)) ** 2
    return 3.0 + fall + rise + noise * np.random.default_rng(0).normal(size=len(x))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggestion_is_where_the_loss_falls_fastest(noise: float) -> None:
    found = suggest(RATES, curve(1e-3, 3e-2, noise))
    assert found.rate == pytest.approx(1e-3, rel=0.6)
    assert found.lowest == pytest.approx(3e-2, rel=0.6)
    assert found.diverges is not None and found.diverges > 0.1


def test_losses_that_are_not_finite_end_the_curve() -> None:
    losses = curve(1e-3, 3e-2)
    losses[RATES > 0.1] = math.nan
    found = suggest(RATES, losses)
    assert found.rate == pytest.approx(1e-3, rel=0.6) and found.diverges == pytest.approx(0.13, rel=0.5)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (curve(10.0, 100.0, 0.02) * 0 + 6, "falls nowhere between rates 1e-06 and 1"),
        (6 + 0.3 * np.random.default_rng(1).normal(size=121), "falls nowhere"),
        (np.linspace(6, 3, 121), "still falls at the highest rate, 1"),
        (np.where(RATES < 2e-6, 6.0, math.nan), "only 7 steps have a finite loss"),
    ],
)
def test_a_curve_that_says_nothing_is_an_error(losses: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suggest(RATES, losses)


def test_the_rate_rises_exponentially_to_the_last_step() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=1e-6, lr_decay_style=LRDecayStyle.RANGE_TEST)
    schedule = RateSchedule(config, TrainingConfig(train_iters=121))
    assert [schedule.learning_rate(step, 8 * step) for step in range(121)] == pytest.approx(RATES.tolist())
    in_samples = RateSchedule(config, TrainingConfig(train_samples=121 * 8, global_batch_size=8))
    assert [in_samples.learning_rate(step, 8 * step) for step in range(121)] == pytest.approx(RATES.tolist())
    with pytest.raises(ConfigError, match=r"min_lr=0\.0 with lr_decay_style=range-test"):
        OptimizerConfig(min_lr=0.0, lr_decay_style=LRDecayStyle.RANGE_TEST)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-from 1 --lr-to 1e-3", "--lr-from=1.0 must be below --lr-to=0.001"),
        ("--lr-from zero", "--lr-from='zero' must be a number above 0"),
        ("--lr-from -1", "must be a number above 0"),
        ("--train-iters 5", "train_iters=5 are too few for a curve"),
        ("--hiden-size 64", "did you mean --hidden-size?"),
        ("--optimizer schedule-free-adamw --lr-decay-style constant", "has no learning-rate schedule"),
    ],
)
def test_wrong_words_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lr_find.main(words.split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
