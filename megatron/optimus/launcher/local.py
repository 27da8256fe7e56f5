"""Starts several ranks on this machine, without torchrun's traceback after a rank's own last line.

The ranks get torchrun's variables and share this terminal. When one fails the others are stopped, and its exit code
becomes the launcher's. A signal to the launcher goes to all ranks, which save and leave; so does the launcher's death.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from types import FrameType

from megatron.optimus.platform import environment

_GRACE_SECONDS = 10.0  # for the other ranks to leave by themselves, where all were asked to
_EXPLAINED = 2  # exit code of a rank that has said what is wrong
_PR_SET_PDEATHSIG = 1  # prctl(2)


def run_ranks(command: list[str], num_ranks: int) -> int:
    """Runs ``command`` once per rank and waits for all; returns 0 or the exit code of the first that failed."""
    port = environment.free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of a job in the background: it stays so
            signal.signal(number, pass_on)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    for rank in range(num_ranks):
        if asked:
            break
        place = environment.for_local_rank(rank, num_ranks, port)
        # Not even kill -9 of the launcher leaves ranks behind that train on.
        outlive = None if prctl is None else lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        ranks.append(subprocess.Popen(command, env=place, preexec_fn=outlive))  # noqa: PLW1509 - one C call, no lock
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            _stop(ranks, _GRACE_SECONDS if asked else 0.5)
            code, rank = min(failed)  # a killed rank (negative code) before those that lost it
            return _interrupted(asked[0]) if asked and code != _EXPLAINED else _report(code, rank)
        if all(code == 0 for code in codes):
            return 0 if len(ranks) == num_ranks else _interrupted(asked[0])
        time.sleep(0.1)


def _report(code: int, rank: int) -> int:
    """Says which rank ended the run unless it has said so itself; returns the launcher's exit code."""
    if code == _EXPLAINED:
        return code
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    sys.stderr.write(
        f"error: rank {rank} ended with {how} and the other ranks were stopped; the same command resumes from the "
        "newest checkpoint\n"
    )
    return code if code > 0 else 128 - code  # as shells report signals


def _interrupted(number: int) -> int:
    """Says why the run has ended early; returns the exit code that shells give a signal."""
    name = signal.Signals(number).name
    sys.stderr.write(f"stopped by {name}; the same command resumes from the newest checkpoint\n")
    return 128 + number


def _stop(ranks: list[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    """Ends the ranks that still run: one that lost its peers would wait for its collective's time-out.

    Those that fail together with the first one get to print their own message. A polite signal would be no use after
    that: a rank answers it at the end of a step, which will not come.
    """
    deadline = time.monotonic() + grace_seconds
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
