"""Runs whose ranks are killed between saves and go on from host memory, against runs that nothing disturbs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.optimus.checkpoint.verify import compare
from tests.helpers import start_program
from tests.integration.conftest import TINY

LAST = 12
OPTIONS = f"--train-iters {LAST} --save-interval 5 --eval-interval 0 --memory-checkpoint-interval 3".split()


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def assert_same(run: Path, undisturbed: Path) -> None:
    """Final weights, moments and random generators, and all steps' numbers, are equal to the last bit."""
    pair = [folder / "checkpoints" / f"step-{LAST:08}" for folder in (run, undisturbed)]
    differences = compare(*pair)
    assert {one.kind for one in differences} >= {"master", "exp_avg", "exp_avg_sq", "rng"}
    assert [one for one in differences if not one.is_same] == []
    assert losses(run) == losses(undisturbed)
    manifests = [json.loads((path / "manifest.json").read_text()) for path in pair]
    assert manifests[0]["metadata"] == manifests[1]["metadata"]  # medians of the health check and the data's position
    assert manifests[0]["consumed_samples"] == manifests[1]["consumed_samples"]


@pytest.mark.parametrize(
    ("ranks", "per_node", "options", "killed"),
    [
        (2, 2, "--zero-stage 1 --expert-model-parallel-size 2 --optimizer-state-dtype int8", "1"),
        (4, 2, "--zero-stage 2 --expert-model-parallel-size 2", "2,3"),  # a node of two, and its memory
    ],
)
def test_killed_between_saves_it_goes_on_from_memory(
    tmp_path: Path, tokens: Path, ranks: int, per_node: int, options: str, killed: str
) -> None:
    def run(name: str, dying: str, step: int) -> subprocess.CompletedProcess[str]:
        words = [dying, str(step), str(memory), str(per_node), *TINY, *OPTIONS, *options.split()]
        words += ["--data-path", str(tokens), "--run-dir", str(tmp_path / name)]
        return start_program("tests.integration.memory_program", words, ranks, timeout=120)

    memory = tmp_path / "memory"
    memory.mkdir()
    undisturbed = run("undisturbed", "none", 0)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert list(memory.iterdir()) == []  # the memory was given back

    first = run("run", killed, 10)  # after the copies of steps 6 and 9 and the saves of 5 and 10
    assert first.returncode != 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000010", ignore_errors=True)  # may not be committed yet
    if per_node < ranks:
        shutil.rmtree(memory / "node-1")
    again = run("run", "none", 0)
    assert again.returncode == 0, again.stderr
    assert "resumed from host memory: step 9," in again.stdout
    assert ("got its state of step 9 from rank" in again.stdout) == (per_node < ranks)
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
