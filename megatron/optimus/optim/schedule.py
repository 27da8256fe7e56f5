"""Learning rate and clipping as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron.optimus.config.schema import LRDecayStyle, OptimizerConfig, WSDDecayStyle


def learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """Learning rate of optimizer step ``step`` (0-based).

    Linear warm-up from ``min_lr`` reaches ``lr`` in the last warm-up step, as in the Optimus paper; then the decay,
    which ends at ``min_lr`` after ``lr_decay_iters`` steps and stays there.
    """
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    span = config.lr - config.min_lr
    if step < warmup:
        return config.min_lr + span * (step + 1) / warmup
    if config.lr_decay_style is LRDecayStyle.INVERSE_SQUARE_ROOT:
        # Without warm-up it starts as if there had been one step. The rate is the peak's where warm-up ends.
        return max(config.min_lr, config.lr * math.sqrt(max(1, warmup) / max(1, step)))
    start = warmup
    if config.lr_decay_style is LRDecayStyle.WSD:
        assert config.lr_wsd_decay_iters is not None
        start = max(warmup, end - config.lr_wsd_decay_iters)
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    return config.min_lr + span * _left(progress, config)


def largest_grad_norm(step: int, config: OptimizerConfig) -> float:
    """Global gradient norm to which optimizer step ``step`` (0-based) is clipped; 0: not at all."""
    is_early = config.clip_grad_after_warmup and step < config.lr_warmup_iters
    return 0.0 if is_early else config.clip_grad


def _left(progress: float, config: OptimizerConfig) -> float:
    """What is left of the way down to ``min_lr``, from 1 at progress 0; 0 at progress 1 for all but CONSTANT."""
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
