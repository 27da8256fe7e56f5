"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron.optimus.config.schema import LRDecayStyle, OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """Learning rate of optimizer step ``step`` (0-based).

    Linear warm-up from ``min_lr`` reaches ``lr`` in the last warm-up step, as in the Optimus paper; then the decay,
    which ends at ``min_lr`` after ``lr_decay_iters`` steps and stays there.
    """
    span = config.lr - config.min_lr
    if step < config.lr_warmup_iters:
        return config.min_lr + span * (step + 1) / config.lr_warmup_iters
    horizon = (config.lr_decay_iters or train_iters) - config.lr_warmup_iters
    progress = min(1.0, (step - config.lr_warmup_iters) / max(1, horizon))
    if config.lr_decay_style is LRDecayStyle.CONSTANT:
        return config.lr
    if config.lr_decay_style is LRDecayStyle.LINEAR:
        return config.min_lr + span * (1.0 - progress)
    return config.min_lr + span * 0.5 * (1.0 + math.cos(math.pi * progress))
