"""The simple noise scale tr(Sigma) / |G|^2 of McCandlish et al. (2018, arXiv 1812.06162), in sequences.

Each step gives unbiased estimates of the numerator and of the denominator (deepspeed_ext/zero/gradient_noise.py), which
scatter much. Exponential averages of both are kept, and the scale is the ratio of the averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.optimus.training.engine import NOISE_GROUPS

DECAY = 0.99  # of the averages over steps
FIELD = "gradient_noise_scale"  # of metrics.jsonl, with /GROUP for parts of the model; and of a checkpoint's metadata


class GradientNoiseScale:
    """Averages over the steps of a run. Every rank sees the same numbers."""

    def __init__(self) -> None:
        self._averages = [0.0] * (2 * len(NOISE_GROUPS))  # |G|^2 and tr(Sigma) of each group

    def observe(self, measured: Sequence[float], samples: int, *, skipped: bool) -> dict[str, float]:
        """Adds a step and returns the noise scale of the model and of its parts, by the names of metrics.

        Args:
            measured: |G|^2 and tr(Sigma) / ``samples`` of each of NOISE_GROUPS; empty where nothing is measured.
            samples: sequences of the step.
            skipped: whether the step was left out; then nothing is averaged.

        Returns:
            Scales in sequences. A part is left out where nothing of it is measured, or the average of its |G|^2 is not
            above zero: there the noise still hides the gradient.
        """
        if measured and not skipped and all(map(math.isfinite, measured)):
            for index, value in enumerate(measured):
                # No correction of the first steps' bias: it is the same factor in numerator and denominator.
                new = value * (samples if index % 2 else 1)
                self._averages[index] = DECAY * self._averages[index] + (1 - DECAY) * new
        pairs = list(zip(self._averages[::2], self._averages[1::2], strict=True))
        parts = {f"{FIELD}/{name}": pair for name, pair in zip(NOISE_GROUPS, pairs, strict=True) if any(pair)}
        whole = {FIELD: (sum(square for square, _ in pairs), sum(trace for _, trace in pairs))}
        both = whole | (parts if len(parts) > 1 else {})
        return {name: max(0.0, trace) / square for name, (square, trace) in both.items() if square > 0}

    def to_json(self) -> dict[str, Any]:
        """What a full checkpoint keeps, so that a resumed run logs what the unbroken one does."""
        return {FIELD: list(self._averages)} if any(self._averages) else {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Takes what ``to_json`` gave from a checkpoint's metadata, where it is there."""
        values = kept.get(FIELD)
        kept_values = values if isinstance(values, list) else []
        numbers = [float(value) for value in kept_values if isinstance(value, int | float) and math.isfinite(value)]
        if len(numbers) == len(kept_values) == len(self._averages):
            self._averages = numbers
