"""A run under ``optimus launch`` whose ranks and launcher are killed, stopped and asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import TINY, environment
from tests.integration.launched_run import LaunchedRun

TRAIN = [*TINY, "--train-iters", "100000", "--eval-interval", "0", "--save-interval", "10", "--log-interval", "1000"]


class Launched(LaunchedRun):
    """A launcher in a process of its own, and the ranks under it."""

    def __init__(self, run_dir: Path, tokens: Path, *words: str) -> None:
        super().__init__(run_dir, run_dir.parent / "log")
        command = [sys.executable, "-m", "megatron.optimus.launch", "--nproc-per-node", "2", *TRAIN, *words]
        command += ["--data-path", str(tokens), "--run-dir", str(run_dir)]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment())

    def ranks(self) -> list[int]:
        """The processes that the launcher's fork server has forked, in rank order."""
        return [rank for server in _children(self.process.pid) for rank in _children(server)]

    def memory_folders(self) -> list[Path]:
        """The folders of links to the memory that the launcher holds."""
        held = f"/proc/{self.process.pid}/fd/"
        return [
            folder
            for folder in Path("/dev/shm").glob("optimus-launch-*/memory")
            if any(os.readlink(link).startswith(held) for link in folder.glob("rank-*"))
        ]

    def wait_for_new_start(self, after: float) -> None:
        """Waits until a start after this time of day has done its first step and a few more."""
        self.wait_until(lambda: any("startup_s/total" in s and s["wall_time"] > after for s in self.steps()[:-15]))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.fixture
def launched(tmp_path: Path, tokens: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*words: str) -> Launched:
        started.append(Launched(tmp_path / "run", tokens, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_ranks_are_replaced_and_a_request_to_stop_is_obeyed(launched: Callable[..., Launched]) -> None:
    """Killed, stopped by SIGSTOP, and asked to stop by SIGTERM: the first two are restarted, the third is not."""
    run = launched("--max-restarts", "5")
    run.wait_for_new_start(0.0)
    server = _children(run.process.pid)
    now = time.time()
    os.kill(run.ranks()[0], signal.SIGKILL)
    run.wait_for_new_start(now)
    text = run.log.read_text()
    assert "error: rank 0 ended with signal SIGKILL" in text
    assert "the next one starts now and resumes" in text and "resumed from" in text
    assert _children(run.process.pid) == server  # nothing was imported anew

    now, stopped = time.time(), run.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    run.wait_for_new_start(now)
    assert f"rank 1 (process {stopped}): stopped by a signal (SIGSTOP) for 1" in run.log.read_text()
    assert "Traceback" not in run.log.read_text()

    os.kill(run.ranks()[1], signal.SIGTERM)  # one rank; rank 0 writes the log
    assert run.process.wait(timeout=60) == 128 + signal.SIGTERM
    text, last = run.log.read_text(), int(run.steps()[-1]["step"])
    assert text.count("; the next one starts") == 2, text
    assert f"asked to stop: saving step {last}" in text and "Traceback" not in text
    assert (run.run_dir / "checkpoints" / f"step-{last:08}").is_dir()
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, last + 1))


def test_restarts_go_on_from_host_memory_which_ends_with_the_launcher(launched: Callable[..., Launched]) -> None:
    """Without any checkpoint on disk; then the launcher is killed: no rank trains on, and no memory stays."""
    words = "--max-restarts 5 --stall-timeout 100 --save-interval 100000 --memory-checkpoint-interval 4".split()
    run = launched(*words)
    run.wait_for_new_start(0.0)
    now, folders = time.time(), run.memory_folders()
    assert len(folders) == 1 and len(list(folders[0].glob("rank-*"))) == 4  # two ranks, two generations
    os.kill(run.ranks()[1], signal.SIGKILL)
    run.wait_for_new_start(now)
    text = run.log.read_text()
    assert "resumed from host memory: step " in text and "the next one starts now" in text
    [first] = [step for step in run.steps() if "startup_s/total" in step and step["wall_time"] > now]
    assert (
        first.get("lost_steps", 0) <= 7
    )  # less than an interval since the last copy, and one where that is not complete
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, len(steps) + 1)) and first["step"] > 1

    ranks = run.ranks()
    assert len(ranks) == 2
    run.process.kill()
    run.process.wait()
    run.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), seconds=30)
    assert not any(folder.exists() for folder in folders)  # the memory itself had no name
    assert not (run.run_dir / "checkpoints" / ".claim").exists()  # another job may have the folder
    assert (run.run_dir / "checkpoints" / f"step-{int(run.steps()[-1]['step']):08}").is_dir()
