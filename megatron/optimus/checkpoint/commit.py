"""The directories of checkpoints: their names, how one is committed by a rename, and how old ones are deleted.

    root/step-00000100              committed, full
    root/step-00000100.r1           the same step saved again; supersedes the one before
    root/model-00000100             committed, weights only
    root/.step-00000120.tmp-<nonce> being written (or left by a killed save)
    root/.step-00000080.old-<nonce> being deleted

A name without a leading dot appears only by renaming a complete, synced directory, so committed checkpoints are whole
at whatever instant a process or a machine dies. Saving a step again takes a new name instead of replacing the old
directory, so at no instant are both missing.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from megatron.optimus.platform.files import delete_tree, sync_directory

_COMMITTED = re.compile(r"(step|model)-(\d{8,12})(?:\.r([1-9]\d{0,5}))?")
_TRANSIENT = re.compile(r"\.(?:step|model)-\d{8,12}(?:\.r\d+)?\.(?:tmp|old)-[0-9a-f]{16}")
_PREFIXES = {"full": "step", "model": "model"}

log = logging.getLogger("optimus")


class Committed(NamedTuple):
    """The name of a committed checkpoint, taken apart. Those of one kind sort by age."""

    step: int
    revision: int
    kind: str = "full"

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{_PREFIXES[self.kind]}-{self.step:08d}" + (f".r{self.revision}" if self.revision else "")


def list_committed(root: Path, kind: str = "full") -> list[Committed]:
    """Lists the committed checkpoints of ``root``, oldest first; none when there is no such directory."""
    return [item for item, is_directory in _named(root, kind) if is_directory]


def list_links(root: Path, kind: str = "full") -> list[Committed]:
    """Lists what has a checkpoint's name and is no directory of its own: links are never read, deleted or replaced."""
    return [item for item, is_directory in _named(root, kind) if not is_directory]


def _named(root: Path, kind: str) -> list[tuple[Committed, bool]]:
    entries = list(os.scandir(root)) if root.is_dir() else []
    items = [(parse_name(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    return sorted((item, is_directory) for item, is_directory in items if item is not None and item.kind == kind)


def set_aside(root: Path) -> Path | None:
    """Moves everything with a full checkpoint's name into a new folder ``root/aside-<n>``, links too.

    Returns the folder; None where there is nothing to move.
    """
    items = [item for item, _ in _named(root, "full")]
    if not items:
        return None
    folder = next(path for n in itertools.count(1) if not (path := root / f"aside-{n}").exists())
    folder.mkdir()
    for item in items:
        os.rename(root / item.name, folder / item.name)
    sync_directory(folder)
    sync_directory(root)
    return folder


def parse_name(name: str) -> Committed | None:
    """Takes the name of a committed directory apart; None for any other name, other spellings of a step included."""
    match = _COMMITTED.fullmatch(name)
    if match is None:
        return None
    kind = "full" if match[1] == _PREFIXES["full"] else "model"
    item = Committed(int(match[2]), int(match[3] or 0), kind)
    return item if item.name == name else None


def temporary_path(root: Path, step: int, nonce: int, kind: str = "full") -> Path:
    """The directory in which a step is written before its commit. ``nonce``: below 2^63, the same on all ranks."""
    return root / f".{Committed(step, 0, kind).name}.tmp-{nonce:016x}"


def commit(root: Path, temporary: Path, step: int, kind: str = "full") -> Committed:
    """Renames a complete directory, manifest included, to its final name, durably."""
    sync_directory(temporary)
    revisions = [item.revision for item, _ in _named(root, kind) if item.step == step]
    item = Committed(step, max(revisions) + 1 if revisions else 0, kind)
    try:
        os.rename(temporary, root / item.name)
    except FileNotFoundError:  # a network disk whose answer was lost asks again, and finds it done
        if not (root / item.name).is_dir():
            raise
    sync_directory(root)
    return item


def prune(root: Path, saved: Committed, retain: int | None) -> None:
    """Deletes older checkpoints, earlier revisions of the same step, and what killed saves have left.

    Checkpoints newer than ``saved`` or of the other kind are never touched. A failure is logged and not raised, because
    the save itself has succeeded.

    Args:
        root: the folder of checkpoints.
        saved: the checkpoint that has just been committed.
        retain: how many of the newest of its kind stay; None keeps all steps.
    """
    try:
        items = [item for item in list_committed(root, saved.kind) if item <= saved]
        newest_of_step = list({item.step: item for item in items}.values())
        keep = set(newest_of_step if retain is None else newest_of_step[-retain:])
        for item in items:
            if item not in keep:
                _delete_committed(root / item.name)
        for entry in list(os.scandir(root)):
            if _TRANSIENT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                delete_tree(Path(entry.path))
    except OSError as error:
        log.warning("old checkpoints in %s could not all be deleted: %s", root, error)


def discard_after(root: Path, step: int) -> list[Committed]:
    """Deletes every checkpoint of a later step, full ones newest first; returns them. Raises OSError."""
    items = [item for kind in ("model", "full") for item in list_committed(root, kind)[::-1] if item.step > step]
    for item in items:
        _delete_committed(root / item.name)
    return items


def _delete_committed(path: Path) -> None:
    """Deletes a committed directory. It is renamed first, so that a kill meanwhile leaves no half checkpoint."""
    hidden = path.with_name(f".{path.name}.old-{secrets.token_hex(8)}")
    os.rename(path, hidden)
    sync_directory(path.parent)  # else a crash could undo the rename and keep the deletions below
    delete_tree(hidden)
