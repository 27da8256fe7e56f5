"""A process ends with the one that started it, however that one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.optimus.platform import parent_death

ROOT = Path(__file__).parents[3]
_PARENT = """
import signal, subprocess, sys
from megatron.optimus.platform import parent_death
before = parent_death.signal_setter(signal.SIGKILL)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], preexec_fn=before)
print(child.pid, flush=True)
child.wait()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has prctl")
def test_a_child_of_a_killed_process_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has prctl")
def test_a_child_whose_parent_died_before_ends_at_once() -> None:
    set_signal = parent_death.signal_setter(signal.SIGTERM, parent=1 << 22)  # nobody's number
    assert set_signal is not None
    if (pid := os.fork()) == 0:
        set_signal()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
