"""Notices that a run goes wrong: updates far out of line are skipped, a run that stays broken ends.

A step is judged by the steps before it. The host knows of those one step late (pending.py), so what is compared with
step k ends at step k - 2 on every device: a run on a GPU, on a CPU and a resumed one decide alike.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import Any

logger = logging.getLogger("optimus")

MAX_SKIPPED_IN_A_ROW = 5
WINDOW = 128  # steps that one is compared with
_FEWEST = 32  # with fewer there is no judgement
_LOSS_SIGMA = 6.0  # a loss so many standard deviations above the mean is told of


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


class Recent:
    """The last values of a run that were finite, with their steps."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=WINDOW + 2)

    def add(self, step: int, value: float) -> None:
        if math.isfinite(value):
            self._values.append((step, value))

    def limit(self, step: int, sigma: float) -> float:
        """``sigma`` standard deviations above the mean of the WINDOW values up to ``step`` - 2; infinity if too few."""
        values = [value for number, value in self._values if number <= step - 2][-WINDOW:]
        if len(values) < _FEWEST:
            return math.inf
        mean = fmean(values)  # statistics' own deviation calculates in fractions: ten times as long, in every step
        return mean + sigma * math.sqrt(fmean((value - mean) ** 2 for value in values))

    def plain(self) -> list[list[float]]:
        """For a checkpoint: [[step, value], ...]."""
        return [[step, value] for step, value in self._values]

    def restore(self, stored: Any) -> None:
        """Takes what ``plain`` gave; what is none of it is left out, as in checkpoints of others."""
        self._values.clear()
        for pair in stored if isinstance(stored, list) else []:
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) for x in pair):
                self.add(int(pair[0]), float(pair[1]))


class Health:
    """Judges the steps of a run; every rank sees the same numbers and comes to the same judgement."""

    def __init__(self, spike_sigma: float = 0.0) -> None:
        """``spike_sigma``: updates with a gradient norm so far above the last ones' are skipped; 0: none is."""
        self._sigma = spike_sigma
        self._losses = Recent()
        self.grad_norms = Recent()
        self._skipped: list[float] = []  # gradient norms of the steps skipped in a row

    def largest_norm(self, step: int) -> float:
        """Gradient norm beyond which the update of ``step`` (from 1) is skipped."""
        return self.grad_norms.limit(step, self._sigma) if self._sigma > 0 else math.inf

    def observe(self, step: int, *, loss: float, grad_norm: float, skipped: bool) -> None:
        """Takes what step ``step`` did. Raises TrainingError at the MAX_SKIPPED_IN_A_ROW-th skipped one in a row."""
        usual = self._losses.limit(step, _LOSS_SIGMA)
        if loss > usual:
            logger.info(  # rank 0 speaks for all
                "loss spike: %.4f in step %d is more than %g standard deviations above the mean of the last %d steps",
                *(loss, step, _LOSS_SIGMA, WINDOW),
            )
        if skipped and math.isfinite(grad_norm):
            logger.info("step %d changes nothing: its gradient norm %.3g is far above the last ones'", step, grad_norm)
        self._losses.add(step, loss)
        self.grad_norms.add(step, grad_norm)
        self._skipped = [*self._skipped, grad_norm] if skipped else []
        if len(self._skipped) >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(_broken(step, self._skipped))


def _broken(step: int, norms: Iterable[float]) -> str:
    norms = list(norms)
    finite = [norm for norm in norms if math.isfinite(norm)]
    what = f"gradient norms were far above the usual ({max(finite):.3g})" if finite else "gradients were not finite"
    return (
        f"{what} in {len(norms)} steps in a row, up to step {step}; the weights are "
        f"those before step {step - len(norms) + 1}. Resume from the last checkpoint with a lower lr, or "
        "look at the data of these steps"
    )
