"""Runs the ranks: starts them on this machine, or runs the launch command and restarts it after a failure.

Ranks on this machine get torchrun's variables and share this terminal. When one fails the others are stopped, and its
exit code becomes the launcher's. A signal to the launcher goes to all ranks, which save and leave; they do not outlive
the launcher either.

A failure on thousands of nodes is often one bad node. Where the output names nodes as lost, those are replaced by
spares; where it names none, as in a hang, each attempt replaces the next node in order. Exit code 2 is a mistake in the
command line or the data: the next attempt would fail too, so it ends the launch. Some launch methods return the code of
a rank that they stopped instead, so two attempts in a row without a training step end the launch too.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.optimus.platform import environment, files

logger = logging.getLogger("optimus")

USER_ERROR = 2  # exit code of a rank that has printed what is wrong with the command line or the data
STALLED = 124  # as GNU timeout
_PR_SET_PDEATHSIG = 1  # prctl(2)
_RANK_GRACE_SECONDS = 10.0  # for the other ranks to leave by themselves, where all received the signal
_KEPT_LINES = 400
_GRACE_SECONDS = 15.0
_LONGEST_PAUSE = 60.0

# What PALS, SLURM and Open MPI write when a node (not merely a process on it) is gone.
_LOST_NODE = (
    r"(?P<host>[\w.-]+): shepherd died from signal",
    r"ping failed on [\w.-]+: No reply from (?P<host>[\w.-]+)",
    r"error: Node failure on (?P<host>[\w.\[\],-]+)",
    r"lost communication with (?:a )?(?:daemon|host|node)[^\n]*?(?:host|node):?\s+(?P<host>[\w.-]+)",
)


@dataclass(frozen=True)
class AttemptResult:
    """How one attempt to run ended."""

    code: int  # exit code; STALLED if it was stopped because it printed nothing
    last_lines: tuple[str, ...]
    interrupted: bool  # the launcher received a stop signal
    has_trained: bool  # at least one training step was done


def run_local_ranks(command: list[str], num_ranks: int) -> int:
    """Runs ``command`` once per rank on this machine; returns 0, or the exit code of the first rank that failed."""
    port, token = environment.free_port(), secrets.token_hex(16)
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of a job in the background: it stays so
            signal.signal(number, forward)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    for rank in range(num_ranks):
        if received:
            break
        env = environment.for_local_rank(rank, num_ranks, port, token)
        # Ranks get SIGTERM when the launcher dies, even by kill -9.
        before_exec = None if prctl is None else lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        ranks.append(subprocess.Popen(command, env=env, preexec_fn=before_exec))  # noqa: PLW1509 - one C call, no lock
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            _stop_ranks(ranks, _RANK_GRACE_SECONDS if received else 0.5)
            code, rank = min(failed)  # a killed rank (negative code) before those that lost it
            return _signal_exit_code(received[0]) if received and code != USER_ERROR else _failed_exit_code(code, rank)
        if all(code == 0 for code in codes):
            return 0 if len(ranks) == num_ranks else _signal_exit_code(received[0])
        time.sleep(0.1)


def _failed_exit_code(code: int, rank: int) -> int:
    """Prints which rank ended the run unless it has printed its error; returns the launcher's exit code."""
    if code == USER_ERROR:
        return code
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    sys.stderr.write(
        f"error: rank {rank} ended with {how} and the other ranks were stopped; the same command resumes from the "
        "newest checkpoint\n"
    )
    return code if code > 0 else 128 - code  # as shells report signals


def _signal_exit_code(number: int) -> int:
    """Prints which signal ended the run; returns the exit code that shells give a signal."""
    name = signal.Signals(number).name
    sys.stderr.write(f"stopped by {name}; the same command resumes from the newest checkpoint\n")
    return 128 + number


def _stop_ranks(ranks: list[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """Kills the ranks that still run after ``grace_seconds``: one that lost its peers would wait for a time-out.

    The grace is for ranks that fail together with the first one to print their message. SIGTERM would be useless: a
    rank handles it at the end of a step, which will not come.
    """
    deadline = time.monotonic() + grace_seconds
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lost_hosts(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Returns those of ``hosts`` that the output names as lost, compared without their domains."""
    named = {match["host"].split(".")[0] for line in lines for p in _LOST_NODE for match in re.finditer(p, line)}
    return [host for host in hosts if host.split(".")[0] in named]


def replace_hosts(
    hosts: Sequence[str], spares: Sequence[str], lost: Sequence[str], attempt: int
) -> tuple[list[str], list[str]]:
    """Returns (hosts, spares) for the next attempt.

    Args:
        hosts: nodes of the attempt that failed.
        spares: nodes not in use.
        lost: nodes named as lost; each is replaced by a spare and not used again. If empty, host number ``attempt``
            modulo their count changes places with the first spare.
        attempt: number of the attempt that failed, from 0.
    """
    active, waiting = list(hosts), list(spares)
    for host in lost or [hosts[attempt % len(hosts)]]:
        if not waiting:
            break
        active[active.index(host)] = waiting.pop(0)
        if not lost:
            waiting.append(host)
    return active, waiting


def run_with_restarts(
    attempt_on: Callable[[Sequence[str]], AttemptResult], hosts: Sequence[str], spares: Sequence[str], max_restarts: int
) -> int:
    """Runs attempts with a growing pause between them, and returns the exit code of the last.

    The last one succeeds, ends with USER_ERROR, is interrupted by a signal, uses up ``max_restarts``, or is the second
    in a row without a training step.

    Args:
        attempt_on: runs one attempt on the nodes given and returns how it ended.
        hosts: nodes of the first attempt; empty where there are none to replace.
        spares: nodes to replace lost ones (``replace_hosts``).
        max_restarts: attempts after the first.
    """
    had_trained = True
    for attempt in range(max_restarts + 1):
        outcome = attempt_on(hosts)
        if outcome.code in (0, USER_ERROR) or outcome.interrupted or attempt == max_restarts:
            return outcome.code
        if not (had_trained or outcome.has_trained):
            logger.error(
                "two attempts in a row ended with code %d before the first step: not started again", outcome.code
            )
            return outcome.code
        had_trained = outcome.has_trained
        lost = lost_hosts(outcome.last_lines, hosts)
        hosts, spares = replace_hosts(hosts, spares, lost, attempt) if hosts else (hosts, spares)
        pause = min(5.0 * 2**attempt, _LONGEST_PAUSE)
        logger.warning(
            "attempt %d ended with code %d (%s); the next one starts in %.0f s and resumes from the newest checkpoint; "
            "%d spare nodes are left",
            attempt + 1,
            outcome.code,
            f"lost nodes: {', '.join(lost)}" if lost else "no node was named",
            pause,
            len(spares),
        )
        time.sleep(pause)
    raise AssertionError("the last attempt returns")


class _StepMonitor:
    """Tells whether a run does training steps, for each of which rank 0 appends a line to the file ``metrics``.

    A resumed run first truncates the file by the lines of lost steps, so growth between two updates is what counts.
    """

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._size = self._size_now()
        self.has_trained = False

    def update(self) -> None:
        size = self._size_now()
        self.has_trained |= size > self._size
        self._size = size

    def _size_now(self) -> int:
        try:
            # Opened: a network file system may answer stat() from its cache.
            with open(files.open_regular(self._metrics, os.O_RDONLY), "rb") as file:
                return file.seek(0, os.SEEK_END)
        except OSError:
            return 0


def run_monitored(
    command: Sequence[str], env: dict[str, str], stall_seconds: float | None, metrics: Path
) -> AttemptResult:
    """Runs a command, prints its output, and stops it after ``stall_seconds`` without a line of output.

    Args:
        command: the command line.
        env: its environment.
        stall_seconds: None for no limit.
        metrics: the file to which the run appends a line for each step.
    """
    steps = _StepMonitor(metrics)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    interrupted, previous = _forward_signals(process)
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    last = [time.monotonic()]

    def print_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last[0] = time.monotonic()
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    reader = threading.Thread(target=print_output, daemon=True)
    reader.start()
    stalled = False
    while process.poll() is None:
        time.sleep(0.1)
        steps.update()
        if stall_seconds is not None and time.monotonic() - last[0] > stall_seconds:
            logger.warning("no output for %.0f s: stopping the ranks", stall_seconds)
            stalled = True
            _stop(process)
    reader.join(timeout=10)
    steps.update()
    for number, handler in previous.items():  # between attempts a signal ends the launcher
        signal.signal(number, handler)
    code = STALLED if stalled else process.returncode
    return AttemptResult(code if code >= 0 else 128 - code, tuple(lines), interrupted[0], steps.has_trained)


def _forward_signals(process: subprocess.Popen[str]) -> tuple[list[bool], dict[int, Any]]:
    """Forwards stop signals to the process.

    Returns a list whose one entry becomes True when a signal came, and the handlers that were set before.
    """
    seen = [False]

    def forward(number: int, frame: FrameType | None) -> None:
        seen[0] = True
        if process.poll() is None:
            process.send_signal(number)

    return seen, {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


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
