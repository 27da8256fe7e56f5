"""Learning rate and gradient clipping as pure functions of the progress; a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron.optimus.config.choices import LRBatchRule
from megatron.optimus.config.duration import batch_sizes, schedule_lengths
from megatron.optimus.config.schema import LRDecayStyle, OptimizerConfig, TrainingConfig, WSDDecayStyle


class RateSchedule:
    """Learning rate and clipping of a run, counted in steps or, with ``train_samples``, in samples.

    Both methods take the number of an optimizer step (from 0) and the position at which its samples begin. With a
    constant batch size a run of n steps and one of n times its samples have the same rates.
    """

    def __init__(self, config: OptimizerConfig, training: TrainingConfig, batch_factor: float = 1.0) -> None:
        """``batch_factor``: on every learning rate, of batch sizes changed at resumes (``batch_factor_after``)."""
        self._batch_factor = batch_factor
        self._config, self._lengths = config, schedule_lengths(config, training)
        self._in_samples, self._sizes = training.train_samples is not None, batch_sizes(training)

    def learning_rate(self, step: int, position: int) -> float:
        """Linear warm-up from ``min_lr`` reaches ``lr`` in the last warm-up step, as in the Optimus paper; then the
        decay, which ends at ``min_lr`` after ``lr_decay_iters`` steps and stays there."""
        return self._batch_factor * self._scheduled_rate(step, position)

    def _scheduled_rate(self, step: int, position: int) -> float:
        config, (warmup, end, wsd_decay) = self._config, self._lengths
        done, coming, first = step, 1, 1
        if self._in_samples:
            done, coming, first = position, self._sizes.at(position), self._sizes.at(0)
        span = config.lr - config.min_lr
        if done < warmup:
            return config.min_lr + span * min(1.0, (done + coming) / warmup)
        if config.lr_decay_style is LRDecayStyle.INVERSE_SQUARE_ROOT:
            # Without warm-up it starts as if there had been one step. The rate is the peak's where warm-up ends.
            return max(config.min_lr, config.lr * math.sqrt(max(first, warmup) / max(first, done)))
        start = max(warmup, end - wsd_decay) if config.lr_decay_style is LRDecayStyle.WSD else warmup
        if config.lr_decay_style is LRDecayStyle.RANGE_TEST:  # the last step has lr
            last = end - (self._sizes.full if self._in_samples else 1)
            progress = (done - start) / max(1, last - start)
            return config.min_lr * (config.lr / config.min_lr) ** min(1.0, progress)
        progress = min(1.0, max(0, done - start) / max(1, end - start))
        return config.min_lr + span * _left(progress, config)

    def largest_grad_norm(self, step: int, position: int) -> float:
        """Global gradient norm to which the step's gradients are clipped; 0 does not clip."""
        is_early = (position if self._in_samples else step) < self._lengths.warmup
        return 0.0 if self._config.clip_grad_after_warmup and is_early else self._config.clip_grad


def batch_factor_after(factor: float, before: int, now: int, rule: LRBatchRule) -> float:
    """Returns the factor on learning rates when a resumed run changes its global batch size.

    Args:
        factor: before the change.
        before: sequences of a full global batch up to here.
        now: and from here on.
        rule: ``lr_batch_rule``. LINEAR keeps the rate a sample (Goyal et al. 2017, arXiv 1706.02677), SQRT the noise of
            Adam's updates (Malladi et al. 2022, arXiv 2205.10287).
    """
    power = {LRBatchRule.NONE: 0.0, LRBatchRule.SQRT: 0.5, LRBatchRule.LINEAR: 1.0}[rule]
    return factor * (now / before) ** power


def _left(progress: float, config: OptimizerConfig) -> float:
    """Share of ``lr`` - ``min_lr`` that is left: 1 at progress 0, and 0 at progress 1 except for CONSTANT."""
    style: LRDecayStyle | WSDDecayStyle = config.lr_decay_style
    if style is LRDecayStyle.CONSTANT:
        return 1.0
    if style is LRDecayStyle.WSD:
        style = config.lr_wsd_decay_style
    if style is WSDDecayStyle.EXPONENTIAL:
        return 2.0 * 0.5**progress - 1.0
    if style is WSDDecayStyle.MINUS_SQRT:
        return 1.0 - math.sqrt(progress)
    if style in (LRDecayStyle.LINEAR, WSDDecayStyle.LINEAR):
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
