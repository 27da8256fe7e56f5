"""Reads the runs of a sweep, and makes of them one table, one picture and one file of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.exit_codes import NUMERIC_ERROR
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.report import figure
from megatron.optimus.report.plot import number
from megatron.optimus.report.read import read_run

OUTCOME, NUMBERS, PICTURE = "sweep_run.json", "sweep.json", "sweep.png"
_TAIL = 10  # the loss of a run is the mean of this share of its steps, the last ones: one in so many


@dataclass(frozen=True)
class RunOutcome:
    """How a run of a sweep went."""

    options: list[str]
    code: int | None  # of its process; None: it runs, or a signal or the machine ended it
    seconds: float
    error: str

    @property
    def has_ended(self) -> bool:
        """Whether the same options would give the same again."""
        return self.code in (0, NUMERIC_ERROR)


@dataclass(frozen=True)
class SweepRow:
    """A run of a sweep in numbers; None where it has none."""

    values: Mapping[str, str]  # of the varied options
    state: str
    steps: int = 0
    loss: float | None = None  # mean over the last steps, nats
    valid_loss: float | None = None  # the last one, nats
    tokens_per_second: float | None = None  # of a device, median
    minutes: float = 0.0
    error: str = ""


def read_outcome(folder: Path) -> RunOutcome | None:
    """How the run of a folder went; None where none was started. A damaged file counts as a run to be resumed."""
    try:
        found = json.loads((folder / OUTCOME).read_text())
        return RunOutcome(list(found["options"]), found["code"], float(found["seconds"]), str(found["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_row(folder: Path, values: Mapping[str, str]) -> SweepRow:
    """Reads a run's numbers from its folder."""
    outcome = read_outcome(folder)
    if outcome is None:
        return SweepRow(values, "not started")
    states = {0: "done", NUMERIC_ERROR: "diverged", None: "unfinished"}
    state = states.get(outcome.code, f"failed ({outcome.code})")
    row: dict[str, Any] = {"minutes": outcome.seconds / 60, "error": outcome.error}
    try:
        metrics = read_run(folder).metrics
    except ConfigError:  # it ended before it had made a file
        return SweepRow(values, state, **row)
    losses, valid = metrics.column("loss"), metrics.column("valid_loss")
    valid = valid[np.isfinite(valid)]
    speed = metrics.column("tokens_per_second_per_device")
    tail = losses[-max(1, len(losses) // _TAIL) :]
    return SweepRow(
        values,
        state,
        steps=int(metrics.steps[-1]) if len(metrics.steps) else 0,
        loss=float(tail.mean()) if len(tail) and np.isfinite(tail).all() else None,
        valid_loss=float(valid[-1]) if len(valid) else None,
        tokens_per_second=float(np.nanmedian(speed)) if np.isfinite(speed).any() else None,
        **row,
    )


def score(row: SweepRow) -> float:
    """The number to rank runs by: the validation loss if there is one, else the loss; inf for a run that failed."""
    value = row.loss if row.valid_loss is None else row.valid_loss
    return math.inf if value is None or row.state != "done" else value


def table(rows: Sequence[SweepRow]) -> list[str]:
    """The lines of the table, the best run marked with a star, and below it why runs failed."""
    best = min(map(score, rows))
    names = list(rows[0].values)
    heads = ["", *names, "state", "steps", "loss", "valid loss", "tokens/s", "minutes"]
    cells = [
        [
            "*" if math.isfinite(best) and score(row) == best else "",
            *(row.values[name] for name in names),
            row.state,
            str(row.steps),
            *(number(value, 5) for value in (row.loss, row.valid_loss, row.tokens_per_second)),
            f"{row.minutes:.1f}",
        ]
        for row in rows
    ]
    widths = [max(len(line[at]) for line in [heads, *cells]) for at in range(len(heads))]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in [heads, *cells]
    ]
    notes = [
        f"{', '.join(f'{name}={value}' for name, value in row.values.items())}: {row.error}"
        for row in rows
        if row.error and row.state != "unfinished"
    ]
    return lines + notes


def write(folder: Path, rows: Sequence[SweepRow]) -> list[Path]:
    """Writes the numbers as JSON and, with matplotlib, the picture; returns the paths. Raises ConfigError."""
    paths = [folder / NUMBERS]
    with naming_write_errors(paths[0]):
        paths[0].write_text(json.dumps([row.__dict__ | {"values": dict(row.values)} for row in rows], indent=1) + "\n")
    if figure.is_drawable() and any(math.isfinite(score(row)) for row in rows):
        paths.append(folder / PICTURE)
        figure.draw(paths[1], [panel(rows)])
    return paths


def panel(rows: Sequence[SweepRow]) -> figure.Panel:
    """Losses over the option with the most values that are numbers, a line for each combination of the others."""
    values = {name: list(dict.fromkeys(row.values[name] for row in rows)) for name in rows[0].values}
    axis = max(values, key=lambda name: (_numbers(values[name]) is not None, len(values[name])))
    numbers = _numbers(values[axis])
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if math.isfinite(score(row)):
            label = ", ".join(f"{name}={value}" for name, value in row.values.items() if name != axis)
            x, y = lines.setdefault(label, ([], []))
            x.append(float(row.values[axis]) if numbers else float(values[axis].index(row.values[axis])))
            y.append(score(row))
    for label, (x, y) in lines.items():
        order = np.argsort(x)
        lines[label] = [x[at] for at in order], [y[at] for at in order]
    is_log = numbers is not None and min(numbers) > 0 and max(numbers) >= 8 * min(numbers)
    has_valid = any(row.valid_loss is not None for row in rows)
    what = f"{'validation' if has_valid else 'training'} loss (nats per token)"
    ticks = () if numbers else tuple(values[axis])
    return figure.Panel("sweep", axis, what, lines, is_log_x=is_log, tick_labels=ticks)


def _numbers(values: Sequence[str]) -> list[float] | None:
    try:
        return [float(value) for value in values]
    except ValueError:
        return None
