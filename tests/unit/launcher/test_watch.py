"""Restarts: which nodes leave, when it goes on and when it does not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import pytest

from megatron.optimus.launcher import watch
from megatron.optimus.launcher.watch import STALLED, Outcome, lost_hosts, next_hosts, run_until_done, run_watched

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
    assert next_hosts(HOSTS, SPARES, ["x2.a.b"], 0) == (["x1.a.b", "x8.a.b", "x3.a.b"], ["x9.a.b"])


def test_without_a_name_nodes_take_turns() -> None:
    hosts, spares = next_hosts(HOSTS, SPARES, [], 0)
    assert (hosts, spares) == (["x8.a.b", "x2.a.b", "x3.a.b"], ["x9.a.b", "x1.a.b"])
    assert next_hosts(hosts, spares, [], 1)[0] == ["x8.a.b", "x9.a.b", "x3.a.b"]


def test_without_spares_the_nodes_stay() -> None:
    assert next_hosts(HOSTS, [], ["x2.a.b"], 0) == (HOSTS, [])


class Attempts:
    """Plays the given outcomes and notes the nodes of each attempt."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.nodes: list[list[str]] = []

    def __call__(self, hosts: Sequence[str]) -> Outcome:
        self.nodes.append(list(hosts))
        return self.outcomes[len(self.nodes) - 1]


def ended(code: int, *lines: str, interrupted: bool = False, has_trained: bool = True) -> Outcome:
    return Outcome(code, lines, interrupted, has_trained)


def test_two_attempts_without_a_step_end_it() -> None:
    attempts = Attempts(ended(1), ended(9, has_trained=False), ended(9, has_trained=False), ended(0))
    assert run_until_done(attempts, HOSTS, SPARES, max_restarts=20) == 9
    assert len(attempts.nodes) == 3


def test_between_attempts_a_signal_ends_the_launcher() -> None:
    before = signal.getsignal(signal.SIGTERM)
    outcome = run_watched([sys.executable, "-c", "print('step=1 loss=2')"], dict(os.environ), None)
    assert outcome.has_trained
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LONGEST_PAUSE", 0.0)


def test_goes_on_with_a_spare_until_it_succeeds() -> None:
    attempts = Attempts(ended(1, "x2: shepherd died from signal 9"), ended(STALLED), ended(0))
    assert run_until_done(attempts, HOSTS, SPARES, max_restarts=5) == 0
    assert attempts.nodes == [
        ["x1.a.b", "x2.a.b", "x3.a.b"],
        ["x1.a.b", "x8.a.b", "x3.a.b"],
        ["x1.a.b", "x9.a.b", "x3.a.b"],
    ]


@pytest.mark.parametrize("last", [ended(2), ended(143, interrupted=True)])
def test_ends_on_a_users_mistake_or_wish(last: Outcome) -> None:
    attempts = Attempts(last)
    assert run_until_done(attempts, HOSTS, SPARES, max_restarts=5) == last.code
    assert len(attempts.nodes) == 1


def test_gives_up_with_the_last_code() -> None:
    attempts = Attempts(ended(1), ended(7))
    assert run_until_done(attempts, [], [], max_restarts=1) == 7


def test_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    outcome = run_watched([sys.executable, "-c", program], dict(os.environ), None)
    assert outcome.code == 3
    assert sorted(line.strip() for line in outcome.last_lines) == ["err", "out"]
    assert "out" in capfd.readouterr().out


def test_silence_is_stopped() -> None:
    program = "import time; print('alive', flush=True); time.sleep(60)"
    outcome = run_watched([sys.executable, "-c", program], dict(os.environ), 1.0)
    assert outcome.code == STALLED
    assert outcome.last_lines == ("alive\n",)
