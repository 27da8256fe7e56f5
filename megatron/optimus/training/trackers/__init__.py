"""Trackers: what shows the metrics of a run besides metrics.jsonl. Each module of this folder is one.

A module has ``open_tracker(run, steps)``, which returns a ``Tracker``, or None where the configuration does not ask for
it. A new tracker is a new module; nothing else needs to know of it. Each works in a thread of its own: one that hangs
or fails neither delays nor ends the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.report.read import SAMPLES, read_file, read_lines
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.background import Background
from megatron.optimus.training.metrics import StepMetrics

_CLOSING_SECONDS = 60.0


class StepRange(NamedTuple):
    """The steps that this process trains."""

    first: int  # steps done before
    last: int
    total_tokens: int  # consumed when the last step is done, by earlier processes of the run too


class Tracker:
    """Interface of a tracker, which gets the metrics of every step once, in order. Exists on rank 0 only."""

    in_background: ClassVar[bool] = True  # False: called by the training loop, which it must not delay

    def open(self) -> None:
        """Connects to the service; called once, before every other method."""

    def log(self, metrics: StepMetrics) -> None:
        """Writes the metrics of one step."""

    def alert(self, alert: Alert) -> None:
        """Writes an alert."""

    def add_files(self, run_dir: Path) -> None:
        """Uploads the samples and the report of a run that has ended, if these files exist."""

    def close(self) -> None:
        """Closes the connection; no other method is called afterwards."""


class BackgroundTracker(Tracker):
    """Runs the methods of a tracker in a thread of its own. If ``open`` fails, no other method is called."""

    def __init__(self, tracker: Tracker, closing_seconds: float = _CLOSING_SECONDS) -> None:
        self._tracker, self._closing_seconds = tracker, closing_seconds
        self._thread, self._is_open = Background(type(tracker).__name__), False
        self._thread.put(self._open)

    def _open(self) -> None:
        self._tracker.open()
        self._is_open = True

    def _do(self, method: str, *arguments: Any) -> None:
        def work() -> None:
            if self._is_open:
                getattr(self._tracker, method)(*arguments)

        self._thread.put(work)

    def log(self, metrics: StepMetrics) -> None:
        self._do("log", metrics)

    def alert(self, alert: Alert) -> None:
        self._do("alert", alert)

    def add_files(self, run_dir: Path) -> None:
        self._do("add_files", run_dir)

    def close(self) -> None:
        self._do("close")
        self._thread.close(self._closing_seconds)


def open_trackers(run: RunContext, steps: StepRange) -> list[Tracker]:
    """Every tracker that the configuration asks for. Raises ConfigError for a missing package."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = [tracker for module in modules if (tracker := module.open_tracker(run, steps)) is not None]
    return [BackgroundTracker(tracker) if tracker.in_background else tracker for tracker in found]


def require_package(module: str, option: str, remedy: str) -> None:
    """Raises ConfigError, with the remedy, where a tracker's package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{option} needs a package that is not installed: {remedy}")


def read_samples(run_dir: Path) -> tuple[list[str], list[list[Any]]] | None:
    """The samples of a run as a table, its columns and rows; None without any. Damaged lines are left out."""
    records = [record for record in read_lines(run_dir / SAMPLES, []) if isinstance(record, dict)]
    columns = list(dict.fromkeys(key for record in records for key in record))

    def cell(value: Any) -> Any:
        return value if value is None or isinstance(value, str | int | float) else json.dumps(value)

    return (columns, [[cell(record.get(key)) for key in columns] for record in records]) if records else None


def read_text(path: Path) -> str:
    """The text of a file of the run; "" where there is none, or it is too large for a tracker."""
    return read_file(path, []).decode(errors="replace")


def kept_id(path: Path) -> str | None:
    """The id of a tracker's run that an earlier process of this run has kept in a file."""
    return read_text(path).strip() or None
