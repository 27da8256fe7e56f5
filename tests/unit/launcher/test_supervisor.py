"""Restarts: which nodes leave, when it goes on and when it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.optimus.launcher import supervisor
from megatron.optimus.launcher.nodes import NodePool
from megatron.optimus.launcher.supervisor import AttemptResult, run_monitored, run_with_restarts
from megatron.optimus.platform.exit_codes import NUMERIC_ERROR, STALLED, STORAGE_ERROR

HOSTS, SPARES = ["x1.a.b", "x2.a.b", "x3.a.b"], ["x8.a.b", "x9.a.b"]


def pool() -> NodePool:
    return NodePool([*HOSTS, *SPARES], len(HOSTS), 1)


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


class Checkpoints:
    """Tells the steps of the newest checkpoint before and after each attempt."""

    def __init__(self, *steps: int) -> None:
        self.steps = [step for step in steps for _ in range(2)][1:]

    def __call__(self) -> int:
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]


def test_two_attempts_without_a_step_end_it() -> None:
    attempts = Attempts(ended(1), ended(9, has_trained=False), ended(9, has_trained=False), ended(0))
    assert run_with_restarts(attempts, pool(), max_restarts=20) == 9
    assert len(attempts.nodes) == 3


def test_attempts_that_never_reach_a_checkpoint_end_it(caplog: pytest.LogCaptureFixture) -> None:
    """A run that is killed within its save interval trains steps in every attempt, and would begin again for ever."""
    attempts = Attempts(*[ended(137)] * 20)
    assert run_with_restarts(attempts, NodePool((), 0, 1), 19, Checkpoints(-1), save_interval=500) == 137
    assert len(attempts.nodes) == 5
    assert "before the first checkpoint, with save_interval=500; choose a smaller --save-interval" in caplog.text


def test_the_pause_begins_anew_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE", 12.0)
    monkeypatch.setattr(supervisor.time, "sleep", pauses.append)
    attempts = Attempts(*[ended(137)] * 8, ended(0))
    # A new checkpoint in the first attempt, none in the next three, one in every further attempt.
    assert run_with_restarts(attempts, NodePool((), 0, 1), 8, Checkpoints(-1, 5, 5, 5, 5, 10, 15, 20, 25, 30)) == 0
    assert pauses == [0, 5, 10, 12, 0, 0, 0, 0]


@pytest.mark.parametrize(("code", "attempts_made"), [(NUMERIC_ERROR, 2), (STORAGE_ERROR, 4)])
def test_a_full_disk_is_tried_again_and_the_same_wrong_numbers_once(code: int, attempts_made: int) -> None:
    attempts = Attempts(*[ended(code)] * 3, ended(0))
    assert run_with_restarts(attempts, NodePool((), 0, 1), 9) == (code if attempts_made == 2 else 0)
    assert len(attempts.nodes) == attempts_made


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
    assert run_with_restarts(attempts, pool(), max_restarts=5) == 0
    assert attempts.nodes == [
        ["x1.a.b", "x2.a.b", "x3.a.b"],
        ["x1.a.b", "x8.a.b", "x3.a.b"],
        ["x1.a.b", "x8.a.b", "x3.a.b"],  # nobody was named: most failures are not a node's
    ]


@pytest.mark.parametrize("last", [ended(2), ended(143, interrupted=True)])
def test_ends_on_a_users_mistake_or_wish(last: AttemptResult) -> None:
    attempts = Attempts(last)
    assert run_with_restarts(attempts, pool(), max_restarts=5) == last.code
    assert len(attempts.nodes) == 1


def test_gives_up_with_the_last_code() -> None:
    attempts = Attempts(ended(1), ended(7))
    assert run_with_restarts(attempts, NodePool((), 0, 1), max_restarts=1) == 7


def test_output_passes_through(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    outcome = run_monitored([sys.executable, "-c", program], dict(os.environ), None, tmp_path / "none")
    assert outcome.code == 3
    assert sorted(line.strip() for line in outcome.last_lines) == ["err", "out"]
    assert "out" in capfd.readouterr().out


def test_silence_is_stopped_after_the_first_step_and_not_before(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    program = "import time; print('alive', flush=True); time.sleep(1.5); "
    program += f"open({str(metrics)!r}, 'w').write('{{}}'); time.sleep(60)"
    began = time.monotonic()
    outcome = run_monitored([sys.executable, "-c", program], dict(os.environ), 1.0, metrics)
    assert outcome.code == STALLED and outcome.has_trained
    assert outcome.last_lines == ("alive\n",)
    assert 2.4 < time.monotonic() - began < 30


def test_who_reported_a_lost_peer_and_who_was_asked_to_stop(tmp_path: Path) -> None:
    said = "error on rank 3: another rank has ended (Connection reset); error on rank 12: another rank has ended"
    program = f"import sys; print('{said}'); print('asked to stop: saving step 7; a second'); sys.exit(143)"
    outcome = run_monitored([sys.executable, "-c", program], dict(os.environ), None, tmp_path / "none")
    assert outcome.survivors == {3, 12}
    assert outcome.interrupted and outcome.code == 143  # a scheduler's signal to one rank is not a failure


def test_the_command_does_not_outlive_the_launcher(tmp_path: Path) -> None:
    rank = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
    call = f"run_monitored([sys.executable, '-c', {rank!r}], dict(os.environ), None, Path('none'))"
    imports = (
        "import os, sys; from pathlib import Path; from megatron.optimus.launcher.supervisor import run_monitored; "
    )
    process = subprocess.Popen([sys.executable, "-c", imports + call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


GROWS = """
import pathlib, signal, sys, time
if sys.argv[2] == "passes it on":
    signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop: saving step 3", flush=True), sys.exit(143)))
pathlib.Path(sys.argv[1]).write_text("{}")
time.sleep(30)
"""


@pytest.mark.parametrize("starter", ["passes it on", "ends at once"])
def test_ranks_are_asked_to_leave_where_more_nodes_can_be_used(
    starter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no failure: it does not count as a restart, and the launcher was not asked to stop."""
    monkeypatch.setattr(supervisor, "GROWTH_SECONDS", 0.05)
    metrics, answers = tmp_path / "metrics.jsonl", iter([False, True])
    nodes = NodePool(["x1", "x2"], 2, 1, fit=lambda count: count, listed=lambda: ["x1", "x2"])
    nodes.after_failure(["x2: shepherd died from signal 9"], ())
    nodes._bad = {}  # as after its repair
    used: list[list[str]] = []

    def attempt(hosts: Sequence[str]) -> AttemptResult:
        used.append(list(hosts))
        if len(hosts) == 2:
            return ended(0)
        command = [sys.executable, "-c", GROWS, str(metrics), starter]
        return run_monitored(command, dict(os.environ), None, metrics, lambda: next(answers) and nodes.can_grow())

    assert run_with_restarts(attempt, nodes, max_restarts=0) == 0
    assert used == [["x1"], ["x1", "x2"]]


def test_too_few_nodes_end_it_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    nodes = NodePool(["x1", "x2", "x3"], 3, 1, fit=lambda count: count if count > 2 else 0)
    attempts = Attempts(*[ended(9, "x2: shepherd died from signal 9")] * 3)
    assert run_with_restarts(attempts, nodes, max_restarts=5) == 9
    assert len(attempts.nodes) == 1
    assert "lost nodes: x2 (named as lost); 2 good nodes left, too few for --min-nodes: not started" in caplog.text
