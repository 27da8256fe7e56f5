"""Ctrl-C during start-up; a signal to a training run: the first sets a flag, a later one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.optimus.platform import signals
from megatron.optimus.platform.signals import StopRequest
from tests.integration.conftest import environment

ROOT = Path(__file__).parents[3]
PROGRAMS = [ROOT / f"megatron/optimus/{name}.py" for name in ("cli", "pretrain", "launch")]
WAIT = "import sys, time; sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(60)"


def interrupted(*calls: str) -> tuple[int, str]:
    """(exit code, standard error) of a process that makes the calls and then gets SIGINT."""
    # Of a job in the background a shell has SIGINT ignored, and so would this process.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    calls = tuple(f"signals.{call}()" for call in calls)
    code = "; ".join([begin, "from megatron.optimus.platform import signals", *calls, WAIT])
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        return process.wait(30), process.stderr.read() if process.stderr else ""


def test_an_interrupt_ends_silently_and_is_an_exception_again_afterwards() -> None:
    assert interrupted("end_on_sigint") == (-signal.SIGINT, "")
    code, errors = interrupted("end_on_sigint", "raise_on_sigint")
    assert code != 0 and "KeyboardInterrupt" in errors


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signals.end_on_sigint()
        signals.raise_on_sigint()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_end_silently_before_they_import_anything_slow(program: Path) -> None:
    before, found, _ = program.read_text(encoding="utf-8").partition("signals.end_on_sigint()\n")
    imports = [line for line in before.splitlines() if line.startswith(("import ", "from "))]
    light = (
        "platform import signals",
        "platform.process_exit",
        "platform.output",
        "import missing_packages",
    )  # modules that import the standard library alone
    slow = [line for line in imports if "torch" in line or ("megatron" in line and not any(x in line for x in light))]
    assert found and slow == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_noted_and_its_echoes_do_nothing(number: signal.Signals) -> None:
    outside = signal.signal(number, signal.SIG_DFL)  # a shell's background jobs inherit that SIGINT is ignored
    try:
        _note_once(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def _note_once(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.signal is None
        for _ in range(3):
            os.kill(os.getpid(), number)
        deadline = time.monotonic() + 10
        while stop.signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.signal is number


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_a_process_that_is_stuck_outside_of_python() -> None:
    stuck = (
        "import ctypes\n"
        "from megatron.optimus.platform.signals import StopRequest\n"
        "with StopRequest():\n"
        "    print(1, flush=True)\n"
        "    pause = ctypes.CDLL(None).usleep\n"
        "    [pause(900_000) for _ in iter(int, 1)]\n"  # a C loop: handlers of Python run seldom
    )
    process = subprocess.Popen([sys.executable, "-c", stuck], stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
