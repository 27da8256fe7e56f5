"""What a run folder remembers of its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.optimus.training.last_checkpoint import FILE_NAME, LastCheckpoint


def _lost(run: Path, root: Path, has_load: bool = False) -> str:
    return LastCheckpoint(run, root).what_is_lost(has_load=has_load)


def test_a_run_that_never_saved_has_nothing_to_lose(tmp_path: Path) -> None:
    assert _lost(tmp_path / "new", tmp_path / "new/checkpoints") == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "save_stall_s": 0.1}\n')  # a save had begun
    assert _lost(tmp_path, tmp_path / "checkpoints") == ""


def test_a_saved_checkpoint_is_remembered_also_where_the_run_was_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    LastCheckpoint(run, run / "checkpoints").record(100)
    LastCheckpoint(run, run / "checkpoints").record(200)
    assert os.listdir(run) == [FILE_NAME]
    os.rename(run, tmp_path / "moved")
    run = tmp_path / "moved"
    lost = _lost(run, run / "checkpoints")
    assert "checkpoint of step 200" in lost and str(run / "checkpoints") in lost
    assert _lost(run, run / "checkpoints", has_load=True) == lost, "a base model does not replace what was trained"
    assert _lost(run, tmp_path / "elsewhere") != "", "another folder does not either"
    assert _lost(run, tmp_path / "elsewhere", has_load=True) == "", "but both together say how to go on"
    LastCheckpoint(run, run / "checkpoints").forget()
    assert _lost(run, run / "checkpoints") == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "x", "folder": "y"}', "\0"])
def test_a_damaged_file_still_says_that_something_was_saved(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert "has saved a checkpoint in" in _lost(tmp_path, tmp_path / "checkpoints")


def test_metrics_of_older_versions_tell_of_a_save(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "save_drain_s": 0.1}\n')
    assert "has saved a checkpoint in" in _lost(tmp_path, tmp_path / "checkpoints")


def test_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000010").symlink_to(tmp_path)
    for has_load in (False, True):
        lost = _lost(tmp_path, tmp_path / "checkpoints", has_load)
        assert "step-00000010 is a link or a file, not a directory" in lost
