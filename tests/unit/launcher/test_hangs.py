"""Hangs: a rank without progress is found by a limit that learns, and named with what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.optimus.launcher import hangs
from megatron.optimus.launcher.hangs import HangWatch, RankFacts, describe
from megatron.optimus.platform import environment, heartbeat
from megatron.optimus.platform.heartbeat import Beat

# A rank that does steps, and from step 20 on what its last argument says. Waiting is a call of this name.
RANK = """
import sys, time
from megatron.optimus.platform import heartbeat
def wait(): time.sleep(60)
def look_for_the_batch(): time.sleep(60)
def compute():
    while True: pass
heartbeat.connect(int(sys.argv[1]))
for step in range(20):
    heartbeat.beat("reading the batches", step)
    time.sleep(0.01)
    heartbeat.beat("optimizer step")
    time.sleep(0.02)
heartbeat.beat("reading the batches", 20)
if sys.argv[2] == "wait":
    heartbeat.beat("optimizer step")
globals()[sys.argv[2]]()
"""


class Ranks:
    """Real processes with heartbeats."""

    def __init__(self, folder: Path, *does: str) -> None:
        (folder / heartbeat.ALIVE).touch()
        holder = open(folder / heartbeat.ALIVE)  # noqa: SIM115 - held as long as this lives
        heartbeat.fcntl.flock(holder, heartbeat.fcntl.LOCK_EX)
        self.holder = holder
        program = folder / "rank.py"
        program.write_text(RANK)
        env = {**os.environ, environment.AGENT_FOLDER: str(folder), "PYTHONPATH": os.getcwd()}
        self.processes = [
            subprocess.Popen([sys.executable, str(program), str(rank), what], env=env) for rank, what in enumerate(does)
        ]
        self.pids = [process.pid for process in self.processes]

    def found(self, watch: HangWatch, seconds: float = 20.0) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if text := watch.poll(self.pids):
                return text
            time.sleep(0.05)
        return ""

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.holder.close()


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hangs, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(hangs, "FILE_SECONDS", 1.0)
    monkeypatch.setattr(hangs, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(hangs, "_POLL_SECONDS", 0.1)
    yield


def test_the_rank_that_does_not_wait_for_others_is_named(tmp_path: Path, short_limits: None) -> None:
    ranks = Ranks(tmp_path, "wait", "look_for_the_batch", "wait")
    try:
        text = ranks.found(HangWatch(tmp_path, tmp_path / "stacks", 600.0))
    finally:
        ranks.close()
    assert text.startswith(
        f"rank 1 (process {ranks.pids[1]}): without progress for 1 s in step 20, reading the batches"
    )
    assert "; at look_for_the_batch (rank.py:5) < <module> (rank.py:17)" in text
    assert "the other ranks wait in wait; stacks of all ranks: " in text
    folder = Path(text.rpartition(": ")[2])
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert "in look_for_the_batch" in (folder / "rank-1.txt").read_text()


def test_a_stopped_rank_is_named_and_not_those_that_wait(tmp_path: Path, short_limits: None) -> None:
    ranks = Ranks(tmp_path, "wait", "wait")
    try:
        watch = HangWatch(tmp_path, tmp_path / "stacks", 600.0, fixed_seconds=60.0)
        deadline = time.monotonic() + 20
        while not (beat := heartbeat.read(tmp_path / "rank-0")) or beat.step < 20:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not watch.poll(ranks.pids)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        text = ranks.found(watch)
        # The stopped one went on to write its stack: neither it nor the other goes on with the run.
        deadline = time.monotonic() + 10  # a process takes a signal when it next gets a core
        while (states := [hangs._state(pid) for pid in ranks.pids]) != ["T", "T"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert states == ["T", "T"]
    finally:
        ranks.close()
    assert text.startswith(f"rank 0 (process {ranks.pids[0]}): stopped by a signal (SIGSTOP) for ")
    assert "the other ranks wait in wait" in text and "at wait (rank.py:4)" in text


def test_a_rank_that_computes_has_longer_and_a_suspended_launcher_blames_nobody(
    tmp_path: Path, short_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, "compute")
    try:
        watch = HangWatch(tmp_path, tmp_path / "stacks", 600.0)
        deadline = time.monotonic() + 20
        while not (beat := heartbeat.read(tmp_path / "rank-0")) or beat.step < 20:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        monkeypatch.setattr(hangs, "_BUSY", 0.05)  # of a core that others use too
        assert "without progress" in ranks.found(watch)
        assert time.monotonic() - began > 4.0  # the limit is one second
        monkeypatch.setattr(hangs, "_SUSPENDED_SECONDS", 0.0)
        monkeypatch.setattr(hangs, "_POLL_SECONDS", 0.0)
        assert not watch.poll(ranks.pids)
    finally:
        ranks.close()


def test_others_may_wait_for_a_slow_file_system(
    tmp_path: Path, short_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "FILE_SECONDS", 4.0)
    ranks = Ranks(tmp_path, "look_for_the_batch", "wait")
    try:
        text = ranks.found(HangWatch(tmp_path, tmp_path / "stacks", 600.0))
    finally:
        ranks.close()
    assert text.startswith("rank 0 (") and "without progress for 4 s" in text


def test_limits_are_learned() -> None:
    watch, fixed = HangWatch(Path(), Path(), 600.0), HangWatch(Path(), Path(), 600.0, 7.0)

    def beat(step: int, seen: int, longest: float, phase: str = "optimizer step") -> Beat:
        return Beat(1, step, 0.0, seen, longest, phase)

    assert watch.limit(beat(-1, 0, 0.0)) == float("inf")  # start-up counts in no limit
    assert fixed.limit(beat(-1, 0, 0.0)) == float("inf")
    assert watch.limit(beat(0, 1, 100.0)) == 600.0  # compiles, connects
    assert watch.limit(beat(9, 5, 0.1)) == 20.0
    assert watch.limit(beat(9, 5, 30.0)) == 150.0
    assert watch.limit(beat(9, 5, 0.1, "reading ahead")) == 120.0
    assert watch.limit(beat(9, 5, 0.1, "saving a checkpoint")) == 600.0  # it may be a hundred times as slow today
    assert fixed.limit(beat(9, 5, 30.0)) == 7.0


def facts(rank: int, *, count: int = 7, waits: str | None = "all_reduce", stopped: bool = False) -> RankFacts:
    return RankFacts(
        rank, 100 + rank, stopped, True, count, f" in phase {count}", True, waits, "f (a.py:1)", f"x{rank}"
    )


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([facts(0), facts(1), facts(2, waits=None)], 2),  # alone outside of a collective, though none is behind
        ([facts(0), facts(1, count=6), facts(2)], 1),  # all wait: the one behind
        ([facts(0, count=6, waits=None), facts(1), facts(2, stopped=True)], 2),  # stopped: whatever the others do
    ],
)
def test_the_rank_that_hangs_is_named_over_all_nodes(ranks: list[RankFacts], named: int) -> None:
    rank, text = describe(ranks, Path("stacks"))
    assert rank == named
    assert text.startswith(f"rank {named} (process {100 + named} on node x{named}): ")
    assert text.endswith("; the other ranks wait in all_reduce; stacks of all ranks: stacks")
