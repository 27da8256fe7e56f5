"""Trackers: what shows the metrics of a run besides metrics.jsonl. Each module of this folder is one.

A module has ``open_tracker(run, steps)``, which returns a ``Tracker``, or None where the configuration does not ask for
it. A new tracker is a new module; nothing else needs to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple, Protocol

from megatron.optimus.context import RunContext
from megatron.optimus.training.metrics import StepMetrics


class StepRange(NamedTuple):
    """The steps that this process trains."""

    first: int  # steps done before
    last: int
    total_tokens: int  # consumed when the last step is done, by earlier processes of the run too


class Tracker(Protocol):
    """Takes every step once, in order. Exists on rank 0 only."""

    def log(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


def open_trackers(run: RunContext, steps: StepRange) -> list[Tracker]:
    """Every tracker that the configuration asks for. Raises ConfigError for a missing package, and trackers' errors."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return [tracker for module in modules if (tracker := module.open_tracker(run, steps)) is not None]
