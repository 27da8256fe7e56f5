"""Learning rate: ends of warm-up and decay, and what lies beyond."""

from __future__ import annotations

import pytest

from megatron.optimus.config.choices import LRBatchRule
from megatron.optimus.config.schema import ConfigError, LRDecayStyle, OptimizerConfig, TrainingConfig, WSDDecayStyle
from megatron.optimus.training.lr_schedule import RateSchedule, batch_factor_after


def config(style: LRDecayStyle, **changes: object) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "lr_decay_style": style, **changes})


def learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """Of a run counted in steps."""
    return RateSchedule(config, TrainingConfig(train_iters=train_iters)).learning_rate(step, position=8 * step)


@pytest.mark.parametrize("style", [LRDecayStyle.COSINE, LRDecayStyle.LINEAR, LRDecayStyle.CONSTANT])
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


@pytest.mark.parametrize(
    ("style", "middle"),
    [
        (WSDDecayStyle.LINEAR, 0.5),
        (WSDDecayStyle.COSINE, 0.5),
        (WSDDecayStyle.EXPONENTIAL, 2 * 0.5**0.5 - 1),
        (WSDDecayStyle.MINUS_SQRT, 1 - 0.5**0.5),
    ],
)
def test_wsd_is_constant_until_its_last_steps(style: WSDDecayStyle, middle: float) -> None:
    wsd = config(LRDecayStyle.WSD, lr_wsd_decay_iters=20, lr_wsd_decay_style=style)
    rates = [learning_rate(step, wsd, 100) for step in range(130)]
    assert rates[:10] == [learning_rate(step, config(LRDecayStyle.COSINE), 100) for step in range(10)]
    assert set(rates[10:81]) == {1.0} and rates[81] < 1.0
    assert rates[90] == pytest.approx(0.1 + 0.9 * middle)
    assert rates[81:101] == sorted(set(rates[81:101]), reverse=True)
    assert rates[100] == rates[129] == pytest.approx(0.1)


def test_a_wsd_run_prolonged_in_its_stable_phase_has_lost_nothing() -> None:
    short, long = (config(LRDecayStyle.WSD, lr_wsd_decay_iters=20, lr_decay_iters=end) for end in (100, 400))
    assert [learning_rate(s, short, 1) for s in range(81)] == [learning_rate(s, long, 1) for s in range(81)]
    assert learning_rate(380, long, 1) == 1.0 and learning_rate(400, long, 1) == pytest.approx(0.1)


def test_wsd_longer_than_the_run_decays_from_the_end_of_warmup() -> None:
    wsd = config(LRDecayStyle.WSD, lr_wsd_decay_iters=1000)
    assert learning_rate(55, wsd, 100) == learning_rate(55, config(LRDecayStyle.LINEAR), 100)


def test_inverse_square_root_starts_at_the_peak_and_stays_above_the_minimum() -> None:
    style = config(LRDecayStyle.INVERSE_SQUARE_ROOT)
    assert learning_rate(9, style, 100) == learning_rate(10, style, 100) == 1.0
    assert learning_rate(40, style, 100) == pytest.approx(0.5)
    assert learning_rate(10**6, style, 100) == 0.1
    assert learning_rate(0, config(LRDecayStyle.INVERSE_SQUARE_ROOT, lr_warmup_iters=0), 100) == 1.0


def test_wsd_and_its_length_come_together() -> None:
    with pytest.raises(ConfigError, match="lr_decay_style=WSD needs lr_wsd_decay_iters"):
        config(LRDecayStyle.WSD)
    with pytest.raises(ConfigError, match=r"lr_wsd_decay_iters=5 is for lr_decay_style=WSD, and this is cosine"):
        config(LRDecayStyle.COSINE, lr_wsd_decay_iters=5)


def test_clipping_may_wait_for_the_end_of_warmup() -> None:
    def norms(training: TrainingConfig, **options: object) -> list[float]:
        rates = RateSchedule(OptimizerConfig(clip_grad=0.5, **options), training)
        return [rates.largest_grad_norm(step, position) for step, position in enumerate((0, 8, 16, 24, 32))]

    assert norms(TrainingConfig(), lr_warmup_iters=3) == [0.5] * 5
    late = {"clip_grad_after_warmup": True}
    for training in (TrainingConfig(), TrainingConfig(train_samples=64)):
        assert norms(training, lr_warmup_iters=3, **late) == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert norms(TrainingConfig(train_samples=64), lr_warmup_samples=9, **late) == [0.0, 0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("style", list(LRDecayStyle))
def test_a_run_counted_in_samples_has_the_rates_of_its_steps(style: LRDecayStyle) -> None:
    """Bit for bit, with lengths in steps and in samples; while the batch grows they follow the samples."""
    wsd = style is LRDecayStyle.WSD
    steps = config(style, lr_decay_iters=40, lr_wsd_decay_iters=7 if wsd else None)
    lengths = {"lr_warmup_samples": 240, "lr_decay_samples": 960, "lr_wsd_decay_samples": 168 if wsd else None}
    samples = config(style, lr_wsd_decay_iters=1 if wsd else None, **lengths)
    constant = TrainingConfig(train_samples=24 * 50, global_batch_size=24)
    growing = TrainingConfig(train_samples=24 * 50, global_batch_size=24, rampup_batch_size=[8, 4, 480])
    for step in range(60):
        expected = learning_rate(step, steps, 50)
        for one in (steps, samples):
            assert RateSchedule(one, constant).learning_rate(step, 24 * step) == expected
        if step >= 10 and style is not LRDecayStyle.INVERSE_SQUARE_ROOT:  # whatever its number, where it begins counts
            assert RateSchedule(samples, growing).learning_rate(1000 + step, 24 * step) == expected
    warm = RateSchedule(samples, growing)
    assert [warm.learning_rate(0, 0), warm.learning_rate(1, 8)] == [0.1 + 0.9 * 8 / 240, 0.1 + 0.9 * 16 / 240]
    assert warm.learning_rate(9, 239) == 1.0, "a batch that reaches beyond the warm-up stays at the peak"


@pytest.mark.parametrize(("rule", "expected"), [(LRBatchRule.NONE, 3), (LRBatchRule.SQRT, 6), (LRBatchRule.LINEAR, 12)])
def test_rates_follow_the_batch_size_of_a_resumed_run(rule: LRBatchRule, expected: float) -> None:
    factor = batch_factor_after(3.0, 8, 32, rule)
    assert factor == pytest.approx(expected)
    assert batch_factor_after(factor, 32, 8, rule) == pytest.approx(3.0), "back at the first size"
    training = TrainingConfig(train_iters=100)
    scaled = RateSchedule(config(LRDecayStyle.COSINE), training, factor).learning_rate(40, 0)
    assert scaled == pytest.approx(expected * learning_rate(40, config(LRDecayStyle.COSINE), 100))
