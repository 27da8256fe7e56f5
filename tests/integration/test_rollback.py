"""Runs that go back to a checkpoint and skip bad samples end as runs that never saw them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.report.page import facts
from megatron.optimus.report.read import read_run
from tests.helpers import start_program
from tests.integration.conftest import TINY

OPTIONS = "--train-iters 26 --save-interval 4 --save-retain 3 --eval-interval 0 --rollback-margin 1".split()


class Runs:
    def __init__(self, folder: Path, tokens: Path) -> None:
        self.folder, self.tokens = folder, tokens

    def __call__(self, name: str, bad: str, *words: str) -> tuple[int, str]:
        options = [*TINY, *OPTIONS, "--run-dir", str(self.folder / name), "--data-path", str(self.tokens), *words]
        found = start_program("tests.integration.rollback_program", [bad, *options], 2, timeout=200)
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
    """Gradients that are not finite in five steps, and later a loss spike, after which the run is interrupted.

    Weights, moments, random generators and metrics end as those of a run that was told to skip these steps.
    """
    bad, policies = "nan:14:18,-40:23:23", ("--on-nan", "rollback", "--on-loss-spike", "rollback")
    code, text = runs("back", bad, *policies, "--exit-interval", "25")
    assert code == 0, text
    assert "micro-batch 0: samples 112, 113 of the order" in text  # of step 15, the first that is looked at
    assert text.count("back to step 12, and past steps 13 to 19") == text.count("past steps 22 to 24") == 1, text
    code, text = runs("back", bad, *policies)
    assert code == 0 and "resumed from" in text and "back to step" not in text, text
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
    assert (by_step[20]["lost_steps"], by_step[21]["lost_steps"]) == (6, 3)


def test_a_run_ends_that_cannot_go_back(runs: Runs) -> None:
    code, text = runs("early", "nan:2:6", "--on-nan", "rollback")
    assert code == 4 and "there is no checkpoint from before step 2 to go back to" in text, text
    code, text = runs("often", "nan:14:26", "--on-nan", "rollback", "--max-rollbacks", "1")
    assert code == 4 and text.count("back to step 12") == 1 and "in 5 steps in a row, up to step 24" in text, text
