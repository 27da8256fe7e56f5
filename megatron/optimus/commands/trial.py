"""Runs `optimus pretrain` with the given options in a process of its own: a trial of lr-find or of a sweep."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.platform import environment, parent_death
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.signals import StopRequest

LOG = "output.txt"  # what the process printed, in the run's folder


def run_trial(options: Sequence[str], folder: Path, num_ranks: int | None) -> tuple[int, bool]:
    """Runs one trial to its end. Forwards a stop signal to the trial, which then saves and ends.

    Args:
        options: of pretrain.
        folder: for the output; made where there is none.
        num_ranks: of `optimus launch` on this machine; None: one process without it.

    Returns:
        The exit code, 128 + n after signal n, and whether this process was asked to stop.

    Raises:
        ConfigError: the folder cannot be written.
    """
    ranks = ["launch", "--nproc-per-node", str(num_ranks)] if num_ranks else ["pretrain"]
    command = [sys.executable, "-m", "megatron.optimus", *ranks, *options]
    variables = environment.current() | environment.import_path()
    with naming_write_errors(folder, "name another --run-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / LOG).open("ab")
    before_exec = parent_death.signal_setter(signal.SIGTERM)
    with log, StopRequest() as stop:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=before_exec,  # noqa: PLW1509 - C calls, no lock
        )
        is_told = False
        while process.poll() is None:
            if stop.signal is not None and not is_told:
                process.send_signal(stop.signal)
                is_told = True
            time.sleep(0.05)
    code = process.returncode
    return (code if code >= 0 else 128 - code), is_told


def last_error(folder: Path) -> str:
    """The last line of a trial's output that says what was wrong, else its last line."""
    lines = (folder / LOG).read_text(errors="replace").strip().splitlines()[-200:]
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ")
