"""Restarts a run after a failure, and runs the command that starts its ranks on several nodes.

A failure on thousands of nodes is often one bad node. Nodes that the output names, and nodes that a check finds bad
(nodes.py), are replaced by spares. Exit code 2 is a mistake in the command line or the data: the next attempt would
fail too, so it ends the launch. Attempts that make no progress end it too: two in a row without a training step, two
with the same numeric error, five without a new checkpoint. Progress is a new checkpoint, as a step that was not saved
is done again. The next attempt starts at once after the first failure since a checkpoint, then after pauses that grow.
"""

from __future__ import annotations

import collections
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from megatron.optimus.launcher.agent import LocalAgent
from megatron.optimus.launcher.nodes import NodePool
from megatron.optimus.platform import files, parent_death
from megatron.optimus.platform.exit_codes import EXPLAINED, NUMERIC_ERROR, STALLED, USER_ERROR
from megatron.optimus.platform.signals import STOP_SIGNALS, handle_stop_signals

logger = logging.getLogger("optimus")

KEPT_LINES = 400
_GRACE_SECONDS = 15.0
_LONGEST_PAUSE = 60.0
GROWTH_SECONDS = 1.0  # between two looks for nodes that have come back
_MOST_WITHOUT_STEP, _MOST_NUMERIC, _MOST_WITHOUT_SAVE = 2, 2, 5  # attempts in a row
# What ranks print: process_groups.lost_peer_reason and Trainer.
_SURVIVOR = re.compile(r"error on rank (\d+): another rank has ended")
_ASKED_TO_STOP = re.compile(r"asked to stop: saving step \d+")
_STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)


@dataclass
class LaunchProgress:
    """How a launch has gone so far: what another coordinator goes on with."""

    attempt: int = 0  # that have failed
    without_step: int = 0
    without_save: int = 0
    numeric: int = 0  # that ended with a numeric error
    step_before: int | None = None  # newest checkpoint before the attempt in hand; None: none is

    def why_not_again(self, code: int, step: int, save_interval: int) -> str:
        """Returns why a further attempt would be useless, "" where it is not.

        Args:
            code: exit code of the last attempt.
            step: of the newest checkpoint before it; -1 without one.
            save_interval: of the run.
        """
        if self.without_step == _MOST_WITHOUT_STEP:
            return f"two attempts in a row ended with code {code} before the first step"
        if self.numeric == _MOST_NUMERIC:
            return "two attempts ended with the same numeric error since the newest checkpoint"
        if self.without_save == _MOST_WITHOUT_SAVE:
            found = f"checkpoint after that of step {step}" if step >= 0 else "first checkpoint"
            return (
                f"{self.without_save} attempts in a row ended before the {found}, with save_interval={save_interval}; "
                "choose a smaller --save-interval"
            )
        return ""


@dataclass(frozen=True)
class AttemptResult:
    """How one attempt to run ended."""

    code: int  # exit code; STALLED if it was stopped because it made no progress
    last_lines: tuple[str, ...] = ()
    interrupted: bool = False  # the launcher received a stop signal, or a rank did and all saved and left
    has_trained: bool = False  # at least one training step was done
    survivors: frozenset[int] = frozenset()  # ranks that reported the loss of a peer
    grows: bool = False  # all saved and left because more nodes can be used
    lost: Mapping[str, str] = field(default_factory=dict)  # nodes that are, each with the evidence
    where: str = ""  # the node of the rank that ended first, or hung


def run_with_restarts(
    attempt_on: Callable[[Sequence[str]], AttemptResult],
    nodes: NodePool,
    max_restarts: int,
    newest_step: Callable[[], int] = lambda: -1,
    save_interval: int = 0,
    progress: LaunchProgress | None = None,
    pause_for: Callable[[float], None] | None = None,
) -> int:
    """Runs attempts until one succeeds or a further one would be useless, and returns the exit code of the last.

    Args:
        attempt_on: runs one attempt on the nodes given and returns how it ended.
        nodes: the nodes, of which bad ones are exchanged after a failure.
        max_restarts: attempts after the first.
        newest_step: the step of the newest checkpoint; -1 without one.
        save_interval: of the run, for the message.
        progress: is kept up to date, for another coordinator; None: nobody needs it.
        pause_for: waits for so many seconds between attempts; default: time.sleep.
    """
    now = progress or LaunchProgress()
    while True:
        before = now.step_before = newest_step() if now.step_before is None else now.step_before
        outcome = attempt_on(nodes.hosts)
        now.step_before = None
        if outcome.grows:  # no failure, and all was saved
            now.without_step = now.without_save = now.numeric = 0
            nodes.after_progress()
            nodes.grow()
            if nodes.problem:
                logger.error("%s: not started again", nodes.problem)
                return outcome.code
            logger.warning("it goes on with %d nodes from the step that was saved", len(nodes.hosts))
            continue
        has_saved = newest_step() > before
        if has_saved:
            now.without_save = now.numeric = 0
            nodes.after_progress()
        if outcome.code in (0, USER_ERROR) or outcome.interrupted or now.attempt == max_restarts:
            return outcome.code
        now.without_step = 0 if outcome.has_trained else now.without_step + 1
        now.without_save += 1
        now.numeric = now.numeric + 1 if outcome.code == NUMERIC_ERROR else 0
        if reason := now.why_not_again(outcome.code, before, save_interval):
            logger.error("%s: not started again", reason)
            return outcome.code
        now.attempt += 1
        pause = 0.0 if now.without_save == 1 else min(5.0 * 2 ** (now.without_save - 2), _LONGEST_PAUSE)
        found = nodes.after_failure(outcome.last_lines, outcome.survivors, outcome.lost, outcome.where)
        if nodes.problem:
            logger.error("%s; %s: not started again", found, nodes.problem)
            return outcome.code
        logger.warning(
            "attempt %d ended with code %d%s; the next one starts %s and resumes from the newest checkpoint%s",
            now.attempt,
            outcome.code,
            f" ({found})" if found else "",
            f"in {pause:.0f} s" if pause else "now",
            f"; {len(nodes.spares)} spare nodes are left" if nodes.hosts else "",
        )
        (pause_for or time.sleep)(pause)


def run_local(agent: LocalAgent, metrics: Path, hint: str) -> AttemptResult:
    """Runs one attempt of all ranks on this machine; ``hint`` ends the line about a rank that hangs."""
    steps = StepMonitor(metrics)
    result = agent.run(steps.update)
    steps.update()
    if result.hang:
        logger.error("%s; all ranks are ended%s", result.hang, hint)
    return AttemptResult(result.code, (), result.interrupted or result.was_asked, steps.has_trained)


class StepMonitor:
    """Tells whether a run does training steps, for each of which rank 0 appends a line to the file ``metrics``.

    A resumed run first truncates the file by the lines of lost steps, so growth between two updates is what counts.
    """

    def __init__(self, metrics: Path, size: int | None = None) -> None:
        self._metrics = metrics
        self.size = self._size_now() if size is None else size
        self.has_trained = False

    def update(self) -> None:
        """Looks at the file of metrics. Call it often."""
        size = self._size_now()
        self.has_trained |= size > self.size
        self.size = size

    def _size_now(self) -> int:
        try:
            # Opened: a network file system may answer stat() from its cache.
            with open(files.open_regular(self._metrics, os.O_RDONLY), "rb") as file:
                return file.seek(0, os.SEEK_END)
        except OSError:
            return 0


def run_monitored(
    command: Sequence[str],
    env: dict[str, str],
    stall_seconds: float | None,
    metrics: Path,
    can_grow: Callable[[], bool] = lambda: False,
) -> AttemptResult:
    """Runs a command, prints its output, and stops it where it has printed nothing for ``stall_seconds``.

    The time counts from the first training step on: a start prints little and may take long.

    Args:
        command: the command line.
        env: its environment.
        stall_seconds: None for no limit.
        metrics: the file to which the run appends a line for each step.
        can_grow: whether more nodes could be used; then the ranks are asked to save and leave.
    """
    steps = StepMonitor(metrics)
    process = _start(command, env)
    received: list[int] = []
    previous = handle_stop_signals(partial(_forward, process, received))
    lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    survivors: set[int] = set()
    was_asked = [False]
    last = [time.monotonic()]

    def print_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last[0] = time.monotonic()
            lines.append(line)
            survivors.update(int(match[1]) for match in _SURVIVOR.finditer(line))
            was_asked[0] |= _ASKED_TO_STOP.search(line) is not None
            sys.stdout.write(line)
            sys.stdout.flush()

    reader = threading.Thread(target=print_output, daemon=True)
    reader.start()
    stalled = asks_to_leave = False
    next_look = time.monotonic() + GROWTH_SECONDS
    while process.poll() is None:
        time.sleep(0.1)
        steps.update()
        if steps.has_trained and not asks_to_leave and time.monotonic() > next_look:
            next_look = time.monotonic() + GROWTH_SECONDS
            if asks_to_leave := can_grow():
                logger.warning("more nodes can be used: the ranks are asked to save")
                process.terminate()
        if not steps.has_trained:
            last[0] = time.monotonic()
        if stall_seconds is not None and time.monotonic() - last[0] > stall_seconds:
            logger.warning("no output for %.0f s: stopping the ranks", stall_seconds)
            stalled = True
            _stop(process)
    reader.join(timeout=10)
    steps.update()
    for number, handler in previous.items():  # between attempts a signal ends the launcher
        signal.signal(number, handler)
    code = STALLED if stalled else process.returncode
    code = code if code >= 0 else 128 - code
    all_left = was_asked[0] and code in _STOP_CODES
    # Whatever the ranks' starter makes of SIGTERM, unless a rank has said what is wrong.
    grows = asks_to_leave and not received and code not in (0, *EXPLAINED)
    is_wanted = bool(received) or (all_left and not grows)
    return AttemptResult(code, tuple(lines), is_wanted, steps.has_trained, frozenset(survivors), grows)


def _start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a command whose output is read here and that ends with this process."""
    before_exec = parent_death.signal_setter(signal.SIGTERM)  # mpiexec and srun pass it on to the ranks
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=before_exec,  # noqa: PLW1509 - C calls, no lock
    )


def _forward(process: subprocess.Popen[str], received: list[int], number: int, frame: FrameType | None) -> None:
    received.append(number)
    if process.poll() is None:
        process.send_signal(number)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stops the process: the first SIGTERM asks ranks to save and leave, the second ends those that hang."""
    for end in (process.terminate, process.terminate, process.kill):
        end()
        try:
            process.wait(_GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()
