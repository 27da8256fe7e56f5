"""Directories of checkpoints: their names, and how one becomes visible in a single rename.

    root/step-00000100              committed
    root/step-00000100.r1           the same step saved again; supersedes the one before
    root/.step-00000120.tmp-<nonce> being written (or left by a killed save)
    root/.step-00000080.old-<nonce> being deleted

A name without a leading dot appears only by renaming a complete, synced directory, so whatever instant a process dies
at, the committed ones are whole. Saving a step again takes a new name instead of replacing: no instant exists at which
neither the old nor the new one is there.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

_COMMITTED = re.compile(r"step-(\d{8,12})(?:\.r([1-9]\d{0,5}))?")
_TRANSIENT = re.compile(r"\.step-\d{8,12}(?:\.r\d+)?\.(?:tmp|old)-[0-9a-f]{16}")

log = logging.getLogger("optimus")


class Committed(NamedTuple):
    """One committed checkpoint; sorts by age."""

    step: int
    revision: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".r{self.revision}" if self.revision else "")


def list_committed(root: Path) -> list[Committed]:
    """Committed checkpoints of ``root``, oldest first; empty when there is no such directory."""
    found = []
    if root.is_dir():
        for entry in os.scandir(root):
            match = _COMMITTED.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                item = Committed(int(match[1]), int(match[2] or 0))
                if item.name == entry.name:  # one spelling per step
                    found.append(item)
    return sorted(found)


def temporary_path(root: Path, step: int, nonce: int) -> Path:
    """Where step ``step`` is written before it is committed; ``nonce``: below 2^63, the same on all ranks."""
    return root / f".{Committed(step, 0).name}.tmp-{nonce:016x}"


def sync_directory(path: Path) -> None:
    """Makes the directory's entries (creations, renames) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and syncs it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(root: Path, temporary: Path, step: int) -> Committed:
    """Gives a complete directory its final name, durably. The manifest must be in it already."""
    sync_directory(temporary)
    revisions = [item.revision for item in list_committed(root) if item.step == step]
    item = Committed(step, max(revisions) + 1 if revisions else 0)
    os.rename(temporary, root / item.name)
    sync_directory(root)
    return item


def prune(root: Path, saved: Committed, retain: int) -> None:
    """Deletes what ``saved`` makes superfluous: older ones beyond ``retain``, its predecessors, leftovers of kills.

    Never touches checkpoints newer than ``saved``. Failing to delete is logged, not raised: the save has succeeded.
    """
    try:
        items = [item for item in list_committed(root) if item <= saved]
        newest_of_step = list({item.step: item for item in items}.values())
        keep = set(newest_of_step[-retain:])
        for item in items:
            if item not in keep:
                delete_directory(root / item.name)
        for entry in list(os.scandir(root)):
            if _TRANSIENT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
    except OSError as error:
        log.warning("old checkpoints in %s could not all be deleted: %s", root, error)


def delete_directory(path: Path) -> None:
    """Deletes a committed directory; first takes its name away, so that a kill in between leaves no half checkpoint."""
    hidden = path.with_name(f".{path.name}.old-{secrets.token_hex(8)}")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
