"""A signal is noted while the step goes on; a later one ends the process, also where Python cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.optimus.platform.stopping import StopRequest
from tests.integration.conftest import environment


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
        "from megatron.optimus.platform.stopping import StopRequest\n"
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
