"""Records a run's newest checkpoint in last_checkpoint.json, so that its loss is noticed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from megatron.optimus.checkpoint import CheckpointError, commit
from megatron.optimus.checkpoint.untrusted import parse_json, read_small_file
from megatron.optimus.platform import files
from megatron.optimus.training import metrics

FILE_NAME = "last_checkpoint.json"
_MAX_BYTES = 1 << 16

logger = logging.getLogger("optimus")


class LastCheckpoint:
    """The file ``<run_dir>/last_checkpoint.json``. Rank 0 alone uses it.

    A run without a checkpoint begins at step 0. The file tells one that never saved any, and so has nothing to lose,
    from one whose checkpoints are gone.

    Args:
        run_dir: the run's folder.
        root: the folder of its checkpoints.
    """

    def __init__(self, run_dir: Path, root: Path) -> None:
        self._run_dir, self._root = run_dir, root
        self._path = run_dir / FILE_NAME

    def record(self, step: int) -> None:
        """Says that a full checkpoint of ``step`` was committed. What cannot be written is logged."""
        # Relative, so that a run folder may be moved as a whole.
        folder = os.path.relpath(self._root.absolute(), self._run_dir.absolute())
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            files.write_atomically(self._path, json.dumps({"folder": folder, "step": step}) + "\n", sync=False)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)

    def forget(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def what_is_lost(self, *, has_load: bool) -> str:
        """Describes what a run whose folder of checkpoints has none that can be read has lost; "" for nothing.

        ``has_load``: the run names another checkpoint to start from. With it a run may go on in a new folder.
        """
        links = commit.list_links(self._root)
        if links:
            return (
                f"{self._root / links[-1].name} is a link or a file, not a directory: such checkpoints are not read, "
                f"and {self._root} has no other"
            )
        step, folder = self._recorded()
        if folder is None or (has_load and folder != self._root.absolute()):
            return ""
        what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        return f"{self._run_dir} has saved {what} in {folder}, and {self._root} has none"

    def _recorded(self) -> tuple[int | None, Path | None]:
        """Step and folder of the last checkpoint; (None, None) where none was ever saved."""
        try:
            found = parse_json(read_small_file(self._path, _MAX_BYTES), str(self._path))
            return int(found["step"]), Path(os.path.normpath(self._run_dir.absolute() / str(found["folder"])))
        except (CheckpointError, KeyError, TypeError, ValueError):
            is_there = self._path.exists()
        # Runs before version 0.7 have no such file; a line after a commit says how long that took.
        is_there = is_there or _tells_of_a_save(self._run_dir / metrics.FILE_NAME)
        return None, self._root.absolute() if is_there else None


def _tells_of_a_save(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as lines:
        return any('"save_drain_s"' in line for line in lines)
