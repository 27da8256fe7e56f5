"""Runs the launch command, and runs it again on other nodes when it fails.

A failure on thousands of nodes is often one bad node. Where the output names nodes as lost, exactly those are
replaced by spares; where it names none, one node after the other takes its turn, because a silent hang has no witness.
Exit code 2 is a mistake in the command line or the data: the same again would fail again, so it ends the launch. Some
starters hide that code behind those of the ranks they stopped, so two attempts in a row without a step end it too.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

logger = logging.getLogger("optimus")

USER_ERROR = 2
STALLED = 124  # as GNU timeout
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
class Outcome:
    """How one attempt ended."""

    code: int  # STALLED if it was stopped for printing nothing
    last_lines: tuple[str, ...]
    interrupted: bool  # the launcher itself was told to stop
    has_trained: bool  # at least one step was done


def lost_hosts(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Those of ``hosts`` that the output names as lost, compared by the first part of their names."""
    named = {match["host"].split(".")[0] for line in lines for p in _LOST_NODE for match in re.finditer(p, line)}
    return [host for host in hosts if host.split(".")[0] in named]


def next_hosts(
    hosts: Sequence[str], spares: Sequence[str], lost: Sequence[str], attempt: int
) -> tuple[list[str], list[str]]:
    """(hosts, spares) for the attempt after number ``attempt`` (from 0): lost nodes leave, spares take their places.

    With none named, the node whose turn it is changes places with the first spare. Without spares nothing changes.
    """
    active, waiting = list(hosts), list(spares)
    for host in lost or [hosts[attempt % len(hosts)]]:
        if not waiting:
            break
        active[active.index(host)] = waiting.pop(0)
        if not lost:
            waiting.append(host)
    return active, waiting


def run_until_done(
    attempt_on: Callable[[Sequence[str]], Outcome], hosts: Sequence[str], spares: Sequence[str], max_restarts: int
) -> int:
    """Runs attempts until one succeeds, the user interrupts, or ``max_restarts`` are used up; returns its exit code."""
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
        hosts, spares = next_hosts(hosts, spares, lost, attempt) if hosts else (hosts, spares)
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


class _Steps:
    """Whether the run does steps: rank 0 adds a line to ``metrics`` for each (output could be anybody's). A resumed run
    first takes back lines of steps that were lost, so what counts is growth from one look to the next."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._size = self._size_now()
        self.were_done = False

    def look(self) -> None:
        size = self._size_now()
        self.were_done |= size > self._size
        self._size = size

    def _size_now(self) -> int:
        try:
            with open(self._metrics, "rb") as file:  # opened: a network file system may answer stat() from its cache
                return file.seek(0, os.SEEK_END)
        except OSError:
            return 0


def run_watched(command: Sequence[str], env: dict[str, str], stall_seconds: float | None, metrics: Path) -> Outcome:
    """Runs a command, passes its output on, and stops it after ``stall_seconds`` without a line of output.

    ``metrics``: the file to which the run adds a line a step.
    """
    steps = _Steps(metrics)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    interrupted, previous = _pass_signals_to(process)
    lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    last = [time.monotonic()]

    def relay() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last[0] = time.monotonic()
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    reader = threading.Thread(target=relay, daemon=True)
    reader.start()
    stalled = False
    while process.poll() is None:
        time.sleep(0.1)
        steps.look()
        if stall_seconds is not None and time.monotonic() - last[0] > stall_seconds:
            logger.warning("no output for %.0f s: stopping the ranks", stall_seconds)
            stalled = True
            _stop(process)
    reader.join(timeout=10)
    steps.look()
    for number, handler in previous.items():  # between attempts a signal ends the launcher itself
        signal.signal(number, handler)
    code = STALLED if stalled else process.returncode
    return Outcome(code if code >= 0 else 128 - code, tuple(lines), interrupted[0], steps.were_done)


def _pass_signals_to(process: subprocess.Popen[str]) -> tuple[list[bool], dict[int, Any]]:
    """Termination of the launcher reaches the ranks; the list's one entry becomes True when it happened.

    Also returns the handlers that were there before.
    """
    seen = [False]

    def pass_on(number: int, frame: FrameType | None) -> None:
        seen[0] = True
        if process.poll() is None:
            process.send_signal(number)

    return seen, {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


def _stop(process: subprocess.Popen[str]) -> None:
    """Ranks take the first signal for a wish to save and leave, which those that hang cannot; the second ends them."""
    for end in (process.terminate, process.terminate, process.kill):
        end()
        try:
            process.wait(_GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()
