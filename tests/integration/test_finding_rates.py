"""lr-find and a sweep that is stopped in its midst, with real runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron.optimus.training.metrics import read_metrics
from tests.integration.conftest import TINY, environment

STEPS = 100  # the sweep is stopped after the first of them


def command(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", "megatron.optimus", name, *map(str, words)]


def has_step(run: Path) -> bool:
    """Whether a line is written: the file is there before the first step."""
    path = run / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def test_a_sweep_that_was_stopped_resumes_its_run_and_lr_find_leaves_no_model(tokens: Path, tmp_path: Path) -> None:
    options = [*TINY, "--data-path", str(tokens), "--eval-interval", "0"]
    words = ["--vary", "lr=1e-2,1e-9", "--run-dir", tmp_path / "sweep", "--keep-checkpoints", "--", *options]
    words += ["--train-iters", STEPS, "--min-lr", "1e-8"]
    first = tmp_path / "sweep/lr=1e-2"
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(command("sweep", *words), env=environment(), stdout=printed, stderr=printed)
        deadline = time.monotonic() + 120
        while not has_step(first) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, (tmp_path / "printed").read_text()
    done = len(read_metrics(first / "metrics.jsonl"))
    assert 0 < done < STEPS and not (tmp_path / "sweep/lr=1e-9").exists()
    assert json.loads((first / "sweep_run.json").read_text())["code"] is None

    # Again: the first run goes on, and the second is refused, as min_lr exceeds its rate.
    result = subprocess.run(command("sweep", *words), env=environment(), capture_output=True, text=True, check=True)
    assert [line["step"] for line in read_metrics(first / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert f"step {done}, {8 * done} samples" in (first / "output.txt").read_text()  # where it resumed
    assert "min_lr=1e-08 exceeds lr=1e-09" in result.stdout and "failed (2)" in result.stdout

    words = ["--lr-from", "1e-5", "--lr-to", "1e-2", "--run-dir", tmp_path / "find", *options, "--train-iters", 24]
    found = subprocess.run(command("lr-find", *words), env=environment(), capture_output=True, text=True, check=False)
    assert found.returncode in (0, 2), found.stderr  # what the curve says of so few steps is not asked here
    left = sorted(path.name for path in (tmp_path / "find").iterdir())
    assert not any(path.is_dir() for path in (tmp_path / "find").iterdir()), left
