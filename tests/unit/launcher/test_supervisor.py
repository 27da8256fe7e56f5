"""Restarts: which nodes leave, when it goes on and when it does not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.optimus.launcher import supervisor
from megatron.optimus.launcher.supervisor import (
    STALLED,
    AttemptResult,
    lost_hosts,
    replace_hosts,
    run_monitored,
    run_with_restarts,
)

HOSTS, SPARES = ["x1.a.b", "x2.a.b", "x3.a.b"], ["x8.a.b", "x9.a.b"]


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("x2.hsn.site: shepherd died from signal 9", ["x2.a.b"]),
        ("ping failed on x1: No reply from x3.hsn.site", ["x3.a.b"]),
        ("srun: error: Node failure on x1", ["x1.a.b"]),
        ("rank 2413 died from signal 11", []),  # often the victim of another node
        ("x7.hsn.site: shepherd died from signal 9", []),  # not one of ours
    ],
)
def test_nodes_named_as_lost(line: str, lost: list[str]) -> None:
    assert lost_hosts(["step=1", line], HOSTS) == lost


def test_lost_nodes_leave_for_good() -> None:
    assert replace_hosts(HOSTS, SPARES, ["x2.a.b"], 0) == (["x1.a.b", "x8.a.b", "x3.a.b"], ["x9.a.b"])


def test_without_a_name_nodes_take_turns() -> None:
    hosts, spares = replace_hosts(HOSTS, SPARES, [], 0)
    assert (hosts, spares) == (["x8.a.b", "x2.a.b", "x3.a.b"], ["x9.a.b", "x1.a.b"])
    assert replace_hosts(hosts, spares, [], 1)[0] == ["x8.a.b", "x9.a.b", "x3.a.b"]


def test_without_spares_the_nodes_stay() -> None:
    assert replace_hosts(HOSTS, [], ["x2.a.b"], 0) == (HOSTS, [])


class Attempts:
    """Plays the given outcomes and notes the nodes of each attempt."""

    def __init__(self, *outcomes: AttemptResult) -> None:
        self.outcomes = list(outcomes)
        self.nodes: list[list[str]] = []

    def __call__(self, hosts: Sequence[str]) -> AttemptResult:
        self.nodes.append(list(hosts))
        return self.outcomes[len(self.nodes) - 1]


def ended(code: int, *lines: str, interrupted: bool = False, has_trained: bool = True) -> AttemptResult:
    return AttemptResult(code, lines, interrupted, has_trained)


def test_two_attempts_without_a_step_end_it() -> None:
    attempts = Attempts(ended(1), ended(9, has_trained=False), ended(9, has_trained=False), ended(0))
    assert run_with_restarts(attempts, HOSTS, SPARES, max_restarts=20) == 9
    assert len(attempts.nodes) == 3


WRITES = "import sys, time; file = open(sys.argv[1], sys.argv[2]); "
DOES = {
    "a step": WRITES + "print('{}', file=file)",
    "a step again, after taking back those that were lost": WRITES
    + "file.truncate(3); file.flush(); time.sleep(0.5); print('{}', file=file)",
    "nothing but take back what was lost": WRITES + "file.truncate(3)",
    "nothing but talk": "print('step=1 loss=2')",
}


@pytest.mark.parametrize(
    ("what", "is_first"), [(what, False) for what in DOES] + [(what, True) for what in DOES if "lost" not in what]
)
def test_steps_are_counted_where_they_are_written(what: str, is_first: bool, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if not is_first:
        metrics.write_text("{}\n" * 3)
    program = [sys.executable, "-c", DOES[what], str(metrics), "a"]
    outcome = run_monitored(program, dict(os.environ), None, metrics)
    assert outcome.code == 0, outcome.last_lines
    assert outcome.has_trained is what.startswith("a step")


def test_a_pipe_in_place_of_the_metrics_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    result = run_monitored([sys.executable, "-c", ""], dict(os.environ), None, tmp_path / "metrics.jsonl")
    assert result.code == 0 and not result.has_trained


def test_between_attempts_a_signal_ends_the_launcher(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_monitored([sys.executable, "-c", ""], dict(os.environ), None, tmp_path / "none")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 0.0)


def test_goes_on_with_a_spare_until_it_succeeds() -> None:
    attempts = Attempts(ended(1, "x2: shepherd died from signal 9"), ended(STALLED), ended(0))
    assert run_with_restarts(attempts, HOSTS, SPARES, max_restarts=5) == 0
    assert attempts.nodes == [
        ["x1.a.b", "x2.a.b", "x3.a.b"],
        ["x1.a.b", "x8.a.b", "x3.a.b"],
        ["x1.a.b", "x9.a.b", "x3.a.b"],
    ]


@pytest.mark.parametrize("last", [ended(2), ended(143, interrupted=True)])
def test_ends_on_a_users_mistake_or_wish(last: AttemptResult) -> None:
    attempts = Attempts(last)
    assert run_with_restarts(attempts, HOSTS, SPARES, max_restarts=5) == last.code
    assert len(attempts.nodes) == 1


def test_gives_up_with_the_last_code() -> None:
    attempts = Attempts(ended(1), ended(7))
    assert run_with_restarts(attempts, [], [], max_restarts=1) == 7


def test_output_passes_through(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    outcome = run_monitored([sys.executable, "-c", program], dict(os.environ), None, tmp_path / "none")
    assert outcome.code == 3
    assert sorted(line.strip() for line in outcome.last_lines) == ["err", "out"]
    assert "out" in capfd.readouterr().out


def test_silence_is_stopped(tmp_path: Path) -> None:
    program = "import time; print('alive', flush=True); time.sleep(60)"
    outcome = run_monitored([sys.executable, "-c", program], dict(os.environ), 1.0, tmp_path / "none")
    assert outcome.code == STALLED
    assert outcome.last_lines == ("alive\n",)
