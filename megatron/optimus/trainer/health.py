"""Stops a run that has gone wrong instead of burning its time."""

from __future__ import annotations

MAX_SKIPPED_IN_A_ROW = 5


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


class SkippedSteps:
    """Counts consecutive steps whose gradients were not finite; every rank sees the same count."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def observe(self, step: int, skipped: bool) -> None:
        """Raises TrainingError at the MAX_SKIPPED_IN_A_ROW-th skipped step in a row."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"gradients were not finite in {self.in_a_row} steps in a row, up to step {step}; the weights are "
                f"those before step {step - self.in_a_row + 1}. Resume from the last checkpoint with a lower lr, or "
                "look at the data of these steps"
            )
