"""A run whose gradients stay broken ends."""

from __future__ import annotations

import pytest

from megatron.optimus.trainer.health import MAX_SKIPPED_IN_A_ROW, SkippedSteps, TrainingError


def test_only_consecutive_skips_end_the_run() -> None:
    health = SkippedSteps()
    for step in range(1, 3 * MAX_SKIPPED_IN_A_ROW):
        health.observe(step, skipped=step % MAX_SKIPPED_IN_A_ROW != 0)
    for step in range(100, 100 + MAX_SKIPPED_IN_A_ROW - 1):
        health = health if step > 100 else SkippedSteps()
        health.observe(step, skipped=True)
    with pytest.raises(TrainingError, match="5 steps in a row, up to step 104; the weights are those before step 100"):
        health.observe(104, skipped=True)
