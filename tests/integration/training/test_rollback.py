"""Runs that go back to a checkpoint and skip bad samples end as runs that never saw them."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.report.page import facts
from megatron.optimus.report.read import read_run
from tests.helpers import start_program
from tests.integration.conftest import TINY

OPTIONS = (
    "--train-iters 26 --save-interval 4 --save-retain 3 --eval-interval 0 --rollback-margin 1 --ema-decay 0.9".split()
)
MIRRORED = ("00000004", "00000008", "00000012", "00000012.r1", "00000020")


class Runs:
    def __init__(self, folder: Path, tokens: Path) -> None:
        self.folder, self.tokens = folder, tokens

    def __call__(self, name: str, bad: str, *words: str, killed_after: int | None = None) -> tuple[int, str]:
        """The exit code and all output of two ranks; killed after a step, with memory that outlives them, or not."""
        first = [] if killed_after is None else ["0,1", str(killed_after), str(self.folder / "memory"), "2"]
        options = [*TINY, *OPTIONS, "--run-dir", str(self.folder / name), "--data-path", str(self.tokens), *words]
        found = start_program("tests.integration.rollback_program", [bad, *first, *options], 2, timeout=200)
        return found.returncode, found.stdout + found.stderr

    def state(self, name: str, step: int = 26) -> Any:
        """Hashes of all tensors of a checkpoint, and what it knows of the steps before."""
        [path] = (self.folder / name / "checkpoints").glob(f"step-{step:08}*")
        manifest = json.loads((path / "manifest.json").read_text())
        return manifest["tensors"], {k: manifest["metadata"][k] for k in ("recent_grad_norms", "recent_values")}

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def runs(tmp_path: Path, tokens: Path) -> Runs:
    return Runs(tmp_path, tokens)


def test_bad_samples_are_passed_over(runs: Runs) -> None:
    """Gradients that are not finite in five steps, and later a loss spike; the ranks are killed after each.

    First they go on from host memory, which was copied after a rollback. Then from the mirror: the memory holds a step
    that went wrong, and the disk is lost. Weights, their average, moments, random generators and metrics end as those
    of a run that was told to skip these steps.
    """
    bad, url = "nan:14:18,-40:23:23", f"file://{runs.folder}/mirror"
    options = "--on-nan rollback --on-loss-spike rollback --memory-checkpoint-interval 11 --checkpoint-mirror".split()
    (runs.folder / "memory").mkdir()
    code, text = runs("back", bad, *options, url, killed_after=22)
    assert code == -signal.SIGKILL, text
    assert "micro-batch 0: samples 112, 113 of the order" in text  # of step 15, the first that is looked at
    assert text.count("back to step 12, and past steps 13 to 19") == 1, text
    uploaded = {path.parent.name for path in runs.folder.glob("mirror/step-*/manifest.json")}
    # Not step 16, which the rollback has deleted; r1 is saved again, with the steps to skip.
    assert {"step-00000012.r1"} <= uploaded <= {f"step-{name}" for name in MIRRORED}, uploaded
    code, text = runs("back", bad, *options, url, killed_after=21)
    assert code == -signal.SIGKILL and "resumed from host memory: step 22," in text, text
    assert text.count("back to step 20, and past steps 22 to 24") == 1, text
    shutil.rmtree(runs.folder / "back/checkpoints")
    code, text = runs("back", bad, *options, url, killed_after=0)
    assert code == 0 and "downloading step-00000020.r1 " in text and "back to step" not in text, text
    skipped = [*range(13, 20), *range(22, 25)]
    code, text = runs("told", "1:0:0", "--iterations-to-skip", *map(str, skipped))
    assert code == 0, text
    assert runs.state("back") == runs.state("told")

    lines, keys = runs.lines("back"), ("step", "loss", "grad_norm", "lr", "consumed_tokens")
    assert [[x[k] for k in keys] for x in lines] == [[x[k] for k in keys] for x in runs.lines("told")]
    numbers = [
        {key.removeprefix("rollback/"): value for key, value in line.items() if key.startswith("rollback/")}
        for line in lines
        if "rollback/to_step" in line
    ]
    steps = {"at_step": 18, "to_step": 12, "first_skipped": 13, "last_skipped": 19}
    assert numbers[0] == steps | {"skipped_in_a_row": 5}
    assert numbers[1]["loss"] > numbers[1]["usual_loss"] + 8 * numbers[1]["spread"] > 0
    assert facts(read_run(runs.folder / "back"))["rollbacks"] == numbers
    by_step = {line["step"]: line for line in lines}
    assert (by_step[20]["lost_steps"], by_step[21]["lost_steps"]) == (6, 4)


def test_a_run_ends_that_cannot_go_back(runs: Runs) -> None:
    code, text = runs("early", "nan:2:6", "--on-nan", "rollback")
    assert code == 4 and "there is no checkpoint from before step 2 to go back to" in text, text
    code, text = runs("often", "nan:14:26", "--on-nan", "rollback", "--max-rollbacks", "1")
    assert code == 4 and text.count("back to step 12") == 1 and "in 5 steps in a row, up to step 24" in text, text
