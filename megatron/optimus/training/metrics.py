"""``<run>/metrics.jsonl``: one JSON object a step, each step once, also after crashes and resumed runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron.optimus.platform.files import open_regular, write_atomically

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The numbers of one step. None means not applicable (no peak known, a dense model).

    The fields from ``peak_memory_gib`` on are absent in the file where they are None.
    """

    step: int  # optimizer steps done, from 1
    consumed_tokens: int  # since the start of training
    global_batch_size: int  # sequences of this step
    loss: float  # nats per token, mean over the global batch, without auxiliary losses
    aux_loss: float | None  # load-balancing loss before its weight
    z_loss: float | None  # router z-loss before its weight
    grad_norm: float  # global, before clipping
    lr: float
    # when the step was logged, in seconds since 1970 (UTC)
    wall_time: float = dataclasses.field(default_factory=time.time)
    step_time_s: float  # from the end of the step before, without pauses
    data_wait_s: float  # part of step_time_s in which rank 0's device was idle, as the next batch had not been read
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    expert_load_max_over_mean: float | None  # worst layer; 1.0 is perfect balance
    router_entropy: float | None  # nats, mean over layers
    dropped_tokens: int | None
    peak_memory_gib: float | None = None  # most that tensors of rank 0's accelerator have taken since the start
    skipped: bool | None = None  # true where the update was left out: a gradient norm not finite, or far too large
    valid_loss: float | None = None
    valid_losses: dict[str, float] | None = None  # of further validation sets, by name: keys valid_loss/NAME
    bits_per_byte: dict[str, float] | None = None  # of validation sets, by name: keys bits_per_byte/NAME
    task_scores: dict[str, float] | None = None  # of eval_tasks, by NAME/METRIC: keys task/NAME/METRIC
    pause_s: float | None = None  # before the step, for validation, a checkpoint or a check of devices
    save_stall_s: float | None = None  # since the line before, training waited this long for checkpoints
    save_drain_s: float | None = None  # a checkpoint was committed since the line before, this long after it was begun
    lost_steps: int | None = None  # of a process's first step: steps done before, after the checkpoint it began from
    lost_s: float | None = None  # what these lost steps had taken, pauses included
    rollback: dict[str, float] | None = None  # of the first step after one, what was done and why: keys rollback/NAME
    # of the process's first step: rank 0's start by phase, keys startup_s/PHASE
    startup_s: dict[str, float] | None = None
    recorded: dict[str, float] | None = None  # what else platform.metrics.record collected, by name: a key each
    expert_load_LE: list[list[int]] | None = None  # slots of each expert in each MoE layer; in expert_load.json alone

    def __post_init__(self) -> None:
        if taken := (self.recorded or {}).keys() & {field.name for field in dataclasses.fields(self)}:
            raise ValueError(f"metrics.record: {', '.join(sorted(taken))} are fields of every step; use another name")


_ABSENT_IF_NONE = {"peak_memory_gib", "skipped", "valid_loss", "pause_s", "save_stall_s", "save_drain_s"}
_ABSENT_IF_NONE |= {"lost_steps", "lost_s"}
# Fields with a number for each name: their keys.
_BY_NAME = {
    "valid_losses": "valid_loss",
    "task_scores": "task",
    "startup_s": "startup_s",
    "rollback": "rollback",
    "bits_per_byte": "bits_per_byte",
}


def flat(metrics: StepMetrics) -> dict[str, Any]:
    """Every number of a step by its key; that of a named validation set is ``valid_loss/NAME``."""
    record: dict[str, Any] = {}
    for key in (field.name for field in dataclasses.fields(metrics) if field.name != "expert_load_LE"):
        value = getattr(metrics, key)
        if key in _BY_NAME:
            record.update({f"{_BY_NAME[key]}/{name}": number for name, number in (value or {}).items()})
        elif key == "recorded":
            record.update(value or {})
        else:
            record[key] = value
    return record


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step that are applicable, by their keys, as trackers show them."""
    return {name: value for name, value in flat(metrics).items() if value is not None and name != "step"}


def to_json(metrics: StepMetrics) -> str:
    """One line without its end. A NaN or infinity becomes null, and ``"nonfinite": true`` says so."""
    record = flat(metrics)
    for key in _ABSENT_IF_NONE:
        if record[key] is None:
            del record[key]
    bad = [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        record.update(dict.fromkeys(bad), nonfinite=True)
    return json.dumps(record, allow_nan=False)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Reads all lines, in order. A last line without its end (the process died while writing) is left out.

    Raises ValueError with the line number for anything else that is not a JSON object with a step.
    """
    with open(path, encoding="utf-8") as lines:
        whole = [(number, line) for number, line in enumerate(lines, start=1) if line.endswith("\n")]
    records = [_parse(line) for _, line in whole]
    for (number, line), record in zip(whole, records, strict=True):
        if record is None:
            raise ValueError(f"{path}, line {number}: not a JSON object with a step: {line[:80]!r}")
    return [record for record in records if record is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsWriter:
    """Appends to ``<run_dir>/metrics.jsonl``. Exists on rank 0 only."""

    def __init__(self, run_dir: str | Path, resume_step: int = 0) -> None:
        """Opens the file as ``open_steps`` does."""
        self.path = Path(run_dir) / FILE_NAME
        self._file, lost = open_steps(self.path, resume_step)
        # What was lost twice counts twice: the lines that are removed may say what was lost before them.
        self._lost_s = sum(_number(one, name) for one in lost for name in ("step_time_s", "pause_s", "lost_s"))
        self._lost_steps = len(lost) + sum(int(_number(one, "lost_steps")) for one in lost)

    def write(self, metrics: StepMetrics) -> None:
        """Appends one line; it is in the file when this returns. The first one says what was lost before it."""
        if self._lost_steps:
            metrics = dataclasses.replace(metrics, lost_steps=self._lost_steps, lost_s=self._lost_s)
        self._lost_steps = 0
        self._file.write(to_json(metrics) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def open_steps(path: Path, resume_step: int) -> tuple[TextIO, list[dict[str, Any]]]:
    """Opens a file of JSON lines with a step each, to append to it, and makes its folder.

    Args:
        path: the file.
        resume_step: lines of later steps, which belong to work that was lost, are removed. 0 starts anew: a file that
            holds anything keeps it as ``NAME.aside-<n>.jsonl``.

    Returns:
        The file, and the lines that were removed. Raises OSError where it cannot be written.
    """
    lost: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and resume_step > 0:
        lost = _keep_up_to(path, resume_step)
    elif path.is_file() and path.stat().st_size > 0:
        names = (path.with_name(f"{path.stem}.aside-{n}.jsonl") for n in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        os.rename(path, aside)
        logging.getLogger("optimus").info("%s of an earlier start is now %s", path, aside.name)
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return open(descriptor, "a", encoding="utf-8", buffering=1), lost


def _number(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _keep_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Rewrites the file with the whole lines up to ``step``; a crash meanwhile leaves the old file. Returns the others.

    A damaged line (a node that lost power mid-write) must not keep a run from resuming: it is dropped with a warning.
    """
    with open(open_regular(path, os.O_RDONLY), encoding="utf-8", errors="replace") as lines:
        records = [_parse(line) for line in lines]
    if None in records:
        logging.getLogger("optimus").warning("%s: dropped %d damaged line(s)", path, records.count(None))
    write_atomically(
        path, "".join(json.dumps(record) + "\n" for record in records if record and record["step"] <= step)
    )
    return [record for record in records if record and record["step"] > step]
