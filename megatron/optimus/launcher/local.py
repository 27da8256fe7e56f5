"""Starts several ranks on this machine, without torchrun's traceback after a rank's own last line.

The ranks get torchrun's variables and share this terminal. When one fails the others are stopped, and its exit code
becomes the launcher's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from megatron.optimus.runtime import launch_env

_GRACE_SECONDS = 10.0  # between asking the other ranks to stop and stopping them


def run_ranks(command: list[str], num_ranks: int) -> int:
    """Runs ``command`` once per rank and waits for all; returns 0 or the exit code of the first that failed."""
    port = launch_env.free_port()
    ranks = [subprocess.Popen(command, env=launch_env.of_rank(rank, num_ranks, port)) for rank in range(num_ranks)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            _stop(ranks)
            return _report(*min(failed))  # a killed rank (negative code) before those that lost it
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _report(code: int, rank: int) -> int:
    """Says which rank ended the run unless it has said so itself (exit code 2); returns the launcher's exit code."""
    if code == 2:
        return code
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    sys.stderr.write(
        f"error: rank {rank} ended with {how} and the other ranks were stopped; the same command resumes from the "
        "newest checkpoint\n"
    )
    return code if code > 0 else 128 - code  # as shells report signals


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks that still run: one that lost its peers would wait for its collective's time-out."""
    deadline = time.monotonic() + _GRACE_SECONDS
    time.sleep(0.5)  # those that fail together with the first one get to print their own message
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
