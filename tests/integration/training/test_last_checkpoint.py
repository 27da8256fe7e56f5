"""A run whose checkpoints are gone or cannot be read does not begin again by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.optimus.checkpoint.manifest import MANIFEST_NAME
from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import Program

QUIET = ("--eval-interval", 0)


def _remove(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _link(run: Path) -> None:
    """As a user does who moves checkpoints to a larger disk."""
    for path in list((run / "checkpoints").glob("step-*")):
        os.rename(path, run.parent / path.name)
        path.symlink_to(run.parent / path.name)


def _damage(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        shard = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)


def _without_record(run: Path) -> None:
    """As a run of an earlier version leaves it, whose metrics tell of a commit."""
    (run / "last_checkpoint.json").unlink()
    text = (run / "metrics.jsonl").read_text().rstrip().removesuffix("}")
    (run / "metrics.jsonl").write_text(text + ', "save_drain_s": 0.1}\n')
    shutil.rmtree(run / "checkpoints")


def _refused(result: subprocess.CompletedProcess[str], words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert len(lines) == 1 and words in lines[0] and "--from-scratch" in lines[0], result.stderr


@pytest.fixture(scope="module")
def trained(train: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    assert train(run, *QUIET, "--train-iters", 4).returncode == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (_remove, "has saved a checkpoint of step 4 in"),
        (_link, "step-00000004 is a link or a file"),
        (_damage, "none of its 2 checkpoints can be loaded"),
        (_without_record, "has saved a checkpoint in"),
    ],
)
def test_lost_checkpoints_stop_a_run(
    train: Program, trained: Path, run: Path, lose: Callable[[Path], None], words: str
) -> None:
    ranks = 2 if lose in (_remove, _damage) else 1
    lose(run)
    lines = (run / "metrics.jsonl").read_bytes()
    options = () if lose is _damage else ("--load", trained / "checkpoints")
    _refused(train(run, *QUIET, "--train-iters", 6, *options, ranks=ranks), words)
    assert (run / "metrics.jsonl").read_bytes() == lines
    again = train(run, *QUIET, "--train-iters", 3, "--from-scratch", ranks=ranks)
    assert again.returncode == 0, again.stderr
    assert (run / "metrics.aside-1.jsonl").read_bytes() == lines
    assert _steps(run / "metrics.jsonl") == [1, 2, 3]
    assert "from_scratch: false" in (run / "config.yaml").read_text(), "meant for that start alone"
    aside = run / "checkpoints/aside-1"
    assert aside.exists() == (lose in (_link, _damage))
    resumed = train(run, *QUIET, "--train-iters", 5, "--from-scratch", ranks=ranks)  # as a launcher starts it again
    assert resumed.returncode == 0 and "step 3, 24 samples consumed" in resumed.stdout, resumed.stdout
    assert _steps(run / "metrics.jsonl") == [1, 2, 3, 4, 5]
    # Nothing of the damaged checkpoints went into the weights that training began with.
    first, third = (read_metrics(path)[2]["loss"] for path in (trained / "metrics.jsonl", run / "metrics.jsonl"))
    assert first == third or (ranks == 2 and abs(first - third) < 1e-4)


def test_a_run_that_never_saved_begins_again_by_itself(train: Program, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "last_checkpoint.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])  # as a kill before the first commit leaves them
    again = train(run, *QUIET, "--train-iters", 2)
    assert again.returncode == 0 and "starting from initial weights" in again.stdout, again.stderr
    assert _steps(run / "metrics.aside-1.jsonl") == [1] and _steps(run / "metrics.jsonl") == [1, 2]


def test_a_run_goes_on_in_a_new_folder_where_load_names_the_old_one(train: Program, run: Path, tmp_path: Path) -> None:
    moved = train(run, *QUIET, "--train-iters", 5, "--save", tmp_path / "new", "--load", run / "checkpoints")
    assert moved.returncode == 0 and "step 4, 32 samples consumed" in moved.stdout, moved.stderr
    assert _steps(run / "metrics.jsonl") == [1, 2, 3, 4, 5]


def test_a_link_that_is_newer_is_named_and_never_replaced(train: Program, run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints/step-00000004"
    os.rename(newest, tmp_path / "moved")
    newest.symlink_to(tmp_path / "moved")
    again = train(run, *QUIET, "--train-iters", 4)
    assert again.returncode == 0, again.stderr
    assert "step-00000004 is a link or a file" in again.stdout + again.stderr
    assert "step 2, 16 samples consumed" in again.stdout
    assert newest.is_symlink() and (tmp_path / "moved" / MANIFEST_NAME).is_file()
    assert (run / "checkpoints/step-00000004.r1" / MANIFEST_NAME).is_file()
