"""Reads the folder of a run, which may be unfinished, damaged, huge, or written by an older version."""

from __future__ import annotations

import gc
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.serialize import read_plain
from megatron.optimus.platform.files import open_regular

METRICS, EXPERT_HISTORY, EXPERT_LOAD = "metrics.jsonl", "expert_load_history.jsonl", "expert_load.json"
SAMPLES, CONFIG, EVALUATION = "samples.jsonl", "config.yaml", "evaluation.json"
_OF_A_RUN = (METRICS, CONFIG, EXPERT_LOAD, "checkpoints", "last_checkpoint.json")

_BLOCK = 1 << 24  # bytes of lines that are parsed at a time
_MOST_KEYS = 400  # of metrics.jsonl; a file with more is damaged or not ours
_MOST_CHECKPOINTS, _LARGEST_MANIFEST = 100, 8 << 20  # a manifest of thousands of files takes long to parse
_LARGEST_FILE = 64 << 20  # of those that are read as a whole
_CHECKPOINT = re.compile(r"(step|model)-(\d{8,12})(?:\.r\d{1,6})?")


class MetricsTail:
    """Reads metrics.jsonl, and later what was appended. A file that was cut or replaced is read anew.

    A line that is no JSON object with a step is counted and left out. A step that is there twice counts once, the last
    time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._position, self._identity, self._end = 0, (0, 0), b""
        self.num_damaged = 0
        self.steps = np.zeros(0, np.int64)
        self.columns: dict[str, np.ndarray] = {}  # by key, a float64 for each step; NaN where there is no number

    def poll(self) -> bool:
        """Reads what is new; True where anything was. Raises OSError where the file cannot be read."""
        descriptor = open_regular(self._path, os.O_RDONLY)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            file.seek(self._position - len(self._end))
            is_same = identity == self._identity and status.st_size >= self._position
            is_same = is_same and file.read(len(self._end)) == self._end
            had = self.steps.size
            if not is_same:
                self._forget()
            self._identity = identity
            is_new = self._read_on(file)
        return is_new or (not is_same and had > 0)

    def _read_on(self, file: BinaryIO) -> bool:
        file.seek(self._position)
        is_new, collects = False, gc.isenabled()
        gc.disable()  # it would look through the many new dictionaries again and again
        try:
            while lines := self._whole_lines(file.read(_BLOCK)):
                self._append(_records(lines))
                is_new = True
                file.seek(self._position)  # behind the last whole line
        finally:
            if collects:
                gc.enable()
        return is_new

    def _whole_lines(self, block: bytes) -> list[bytes]:
        """The lines of a block that have their end; the rest is read again the next time."""
        whole = block[: block.rfind(b"\n") + 1]
        if not whole and len(block) == _BLOCK:  # no line is that long: skip it
            self._position += len(block)
            return [b""]
        self._position += len(whole)
        self._end = whole[-64:] or self._end
        return whole.splitlines()

    def _append(self, records: list[Any]) -> None:
        good = [one for one in records if isinstance(one, dict) and type(one.get("step")) is int]
        good = [one for one in good if 0 <= one["step"] < 2**53]
        self.num_damaged += len(records) - len(good)
        steps = np.concatenate([self.steps, np.array([one["step"] for one in good], np.int64)])
        # The last of equal steps counts: np.unique gives the first of the reversed ones.
        self.steps, last = np.unique(steps[::-1], return_index=True)
        order = len(steps) - 1 - last
        found = _columns(good)
        for key in list(dict.fromkeys([*self.columns, *found]))[:_MOST_KEYS]:
            old = self.columns.get(key, np.full(len(steps) - len(good), math.nan))
            new = found.get(key, np.full(len(good), math.nan))
            self.columns[key] = np.concatenate([old, new])[order]

    def column(self, key: str) -> np.ndarray:
        """The numbers of a key by step; NaN where there are none."""
        return self.columns.get(key, np.full(len(self.steps), math.nan))


def _records(lines: list[bytes]) -> list[Any]:
    """Parses lines; one that is no JSON becomes None."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # a third of the time that a call for each line takes
        if len(found) == len(lines):
            return list(found)
    except (ValueError, RecursionError):
        pass
    return [_parsed(line) for line in lines]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _columns(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The numbers of records by key. Records with the same keys are one matrix: that is four times as fast."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, record in enumerate(records):
        alike.setdefault(tuple(record), []).append(index)
    columns: dict[str, np.ndarray] = {}
    for keys, indices in alike.items():
        matrix = _numbers([list(records[index].values()) for index in indices])
        for key, values in zip(keys, matrix.T, strict=True):
            if key not in columns:
                columns[key] = np.full(len(records), math.nan)
            columns[key][indices] = values
    return columns


def _numbers(rows: list[list[Any]]) -> np.ndarray:
    try:
        matrix = np.array(rows, dtype=np.float64)
        if matrix.ndim == 2:
            matrix[~np.isfinite(matrix)] = math.nan
            return matrix
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([[_number(value) for value in row] for row in rows], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


@dataclass
class Checkpoint:
    """A checkpoint that lies in the run's folder."""

    name: str
    kind: str  # "full" or "model"
    step: int
    num_bytes: int | None = None  # None: the manifest cannot be read, or is large
    layout: str = ""
    warnings: list[str] = field(default_factory=list)  # marks of the save


@dataclass
class ExpertRow:
    """Slots of each expert in each MoE layer, summed over some steps."""

    first_step: int
    step: int
    slots_LE: np.ndarray  # float64


@dataclass
class RunRecord:
    """What the folder of a run holds."""

    folder: Path
    name: str
    metrics: MetricsTail
    config: dict[str, dict[str, Any]]  # by section; {} where there is none
    experts: list[ExpertRow]  # over time; one row of all steps for a run that kept no history
    checkpoints: list[Checkpoint]
    samples: list[dict[str, Any]]
    evaluation: dict[str, Any]
    profile: str  # table of torch.profiler
    notes: list[str]  # what could not be read


def check_run(folder: Path) -> None:
    """Raises ConfigError unless ``folder`` is the folder of a run."""
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder; name the --run-dir of a run")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name the folder of a run, the one that holds {METRICS}")
    try:
        found = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    if not found & set(_OF_A_RUN):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
        hint = f"; it holds the runs {', '.join(inside[:8])}" if inside else ""
        raise ConfigError(f"{folder} is no run: it has neither {METRICS} nor {CONFIG}{hint}; name a run's --run-dir")


def read_run(folder: Path) -> RunRecord:
    """Reads a run's folder. What cannot be read is a line of ``notes``.

    Raises:
        ConfigError: ``folder`` is not the folder of a run.
    """
    check_run(folder)
    notes: list[str] = []
    tail = MetricsTail(folder / METRICS)
    try:
        tail.poll()
    except FileNotFoundError:
        notes.append(f"{METRICS} is not there: no step was logged yet")
    except OSError as error:
        notes.append(f"{METRICS} cannot be read: {error.strerror}")
    if tail.num_damaged:
        notes.append(f"{METRICS}: {tail.num_damaged} damaged line(s) left out")
    return RunRecord(
        folder,
        folder.absolute().name,
        tail,
        config=read_config(folder, notes),
        experts=read_experts(folder, notes),
        checkpoints=read_checkpoints(folder),
        samples=[one for one in read_lines(folder / SAMPLES, notes) if _is_sample(one)],
        evaluation=_read_json(folder / EVALUATION, notes),
        profile=_profile(folder),
        notes=notes,
    )


def read_config(folder: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Reads config.yaml by section, without checking options: those of other versions are shown as they are."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        data = read_plain(str(path))
    except ConfigError as error:
        notes.append(f"{CONFIG}: {error}")
        return {}
    sections = data.items() if isinstance(data, Mapping) else ()
    return {str(name): dict(options) for name, options in sections if isinstance(options, Mapping)}


def read_experts(folder: Path, notes: list[str]) -> list[ExpertRow]:
    """Reads the load of experts over time; of a run without that file, of all steps of its last process."""
    rows = [row for one in read_lines(folder / EXPERT_HISTORY, notes) if (row := _expert_row(one, "slots"))]
    if not rows:
        total = _expert_row(_read_json(folder / EXPERT_LOAD, notes), "total_slots_per_layer_and_expert")
        rows = [total] if total else []
    return [row for row in rows if row.slots_LE.shape == rows[-1].slots_LE.shape]


def _expert_row(record: Any, key: str) -> ExpertRow | None:
    try:
        slots_LE = np.array(record[key], dtype=np.float64)
        row = ExpertRow(int(record["first_step"]), int(record["step"]), slots_LE)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return row if slots_LE.ndim == 2 and slots_LE.size and np.isfinite(slots_LE).all() else None


def _is_sample(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("text"), str) and isinstance(one.get("step"), int)


def read_lines(path: Path, notes: list[str]) -> list[Any]:
    """Reads a file of JSON lines, without those that are none; [] where there is no such file."""
    text = read_file(path, notes)
    return [one for line in text.splitlines() if (one := _parsed(line)) is not None]


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    text = read_file(path, notes)
    found = _parsed(text) if text else {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged")
        return {}
    return found


def read_file(path: Path, notes: list[str], limit: int = _LARGEST_FILE) -> bytes:
    """The content of a file; b"" where there is none or it is too large, which is noted."""
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return b""
    if len(data) > limit:
        notes.append(f"{path.name} has more than {limit >> 20} MiB and was left out")
        return b""
    return data


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """Lists the committed checkpoints of a run, oldest first, the newest _MOST_CHECKPOINTS of them.

    Hashes are not checked: ``optimus verify`` does.
    """
    recorded = _read_json(folder / "last_checkpoint.json", []).get("folder")
    root = folder / (recorded if isinstance(recorded, str) else "checkpoints")
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    matches = sorted(filter(None, map(_CHECKPOINT.fullmatch, names)), key=lambda match: (int(match[2]), match[0]))
    return [_checkpoint(root, match) for match in matches[-_MOST_CHECKPOINTS:]]


def _checkpoint(root: Path, match: re.Match[str]) -> Checkpoint:
    found = Checkpoint(match[0], "full" if match[1] == "step" else "model", int(match[2]))
    text = read_file(root / match[0] / "manifest.json", [], _LARGEST_MANIFEST)
    manifest = _parsed(text) if text else None
    if isinstance(manifest, dict):
        files, layout, metadata = (_mapping(manifest.get(key)) for key in ("files", "layout", "metadata"))
        found.num_bytes = sum(size for size in files.values() if isinstance(size, int))
        found.layout = " ".join(f"{axis}={size}" for axis, size in layout.items())
        found.warnings = [line for line in _texts(metadata.get("warnings"))][:8]
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> Iterable[str]:
    return (line for line in value if isinstance(line, str)) if isinstance(value, list) else ()


def _profile(folder: Path) -> str:
    """The newest table of the profiler, of the lowest rank."""
    tables = sorted(folder.glob("profile/steps-*-rank-*.txt"), key=lambda path: (-path.stat().st_mtime, path.name))
    return read_file(tables[0], [], 1 << 18).decode(errors="replace") if tables else ""
