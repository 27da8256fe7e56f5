"""Tuned tiles on disk: one JSON file that many processes may read and write at once.

    {"format": 1, "devices": {<Hardware.key>: {<str(problem)>: {"tiles": {...}, "microseconds": ...}}}}

The file is replaced whole (a temporary file, then a rename), so a reader sees the old or the new one. Writers hold a
lock on a file beside it and keep each other's entries; on a file system without locks the last writer may lose
another's entries, never the file. A file that cannot be read gives one warning and counts as no tuned tiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.optimus.ops.triton.candidates import CANDIDATES, Entry, Table, as_record, of_record
from megatron.optimus.platform import environment, files

logger = logging.getLogger("optimus")
_FORMAT = 1


def load(path: Path | None = None) -> dict[str, Table]:
    """Valid entries of the file (default: ``environment.tiles_file``) by device; none where there is no file."""
    path = environment.tiles_file() if path is None else path
    tables, num_illegal = parse(_read(path))
    if num_illegal:
        logger.warning("tuned tiles: %d entries of %s are none of this version's and are not used", num_illegal, path)
    return tables


def parse(devices: Mapping[str, Any]) -> tuple[dict[str, Table], int]:
    """Entries by device, and how many were left out: not an entry, or tiles that are no candidate of their kernel."""
    tables: dict[str, Table] = {}
    num_illegal = 0
    for device, records in devices.items():
        entries = {}
        for problem, record in records.items() if isinstance(records, dict) else [("", None)]:
            try:
                entry = of_record(record)
            except ValueError:
                num_illegal += 1
                continue
            if entry.tiles in CANDIDATES.get(problem.split(" ", 1)[0], ()):
                entries[problem] = entry
            else:
                num_illegal += 1
        tables[device] = entries
    return tables, num_illegal


def records(tables: Mapping[str, Mapping[str, Entry]]) -> dict[str, dict[str, Any]]:
    """Converts entries by device to the JSON types that ``parse`` reads."""
    return {device: {p: as_record(entry) for p, entry in entries.items()} for device, entries in tables.items()}


def save(device: str, entries: Mapping[str, Entry], path: Path | None = None) -> None:
    """Adds a device's entries to the file, over those of the same problems. Raises OSError if it cannot be written."""
    path = environment.tiles_file() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(path):
        devices = dict(_read(path))
        before = devices.get(device)
        devices[device] = {**(before if isinstance(before, dict) else {}), **records({device: entries})[device]}
        _replace(path, json.dumps({"format": _FORMAT, "devices": devices}, indent=1, sort_keys=True) + "\n")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("tuned tiles: %s cannot be read (%s) and is not used; remove it", path, error)
        return {}
    if isinstance(data, dict) and data.get("format") == _FORMAT and isinstance(data.get("devices"), dict):
        devices: Mapping[str, Any] = data["devices"]
        return devices
    logger.warning("tuned tiles: %s is no table of format %d and is not used; remove it", path, _FORMAT)
    return {}


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    import fcntl

    with open(files.open_regular(f"{path}.lock", os.O_WRONLY | os.O_CREAT), "wb") as lock:
        with contextlib.suppress(OSError):  # no locks here: see above
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing releases the lock


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # with the user's permissions, unlike mkstemp's
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
