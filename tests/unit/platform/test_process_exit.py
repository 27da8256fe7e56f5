"""How a program ends: its exit code, what is printed, and which exit handlers run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.platform.process_groups import leave_after_error
from tests.helpers import _CONTEXT, free_port

ROOT = Path(__file__).parents[3]


def run(body: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Runs ``main`` with this body by ``run_program``, with an exit handler that prints a line."""
    program = "import atexit, os, signal, sys, threading, time\n"
    program += "from megatron.optimus.platform import process_exit\n"
    program += "atexit.register(print, 'handler ran')\n"
    program += "def main():\n" + textwrap.indent(textwrap.dedent(body), "    ")
    program += "\nprocess_exit.run_program(main)\n"
    words = [sys.executable, "-c", program]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        words, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=ROOT, env=buffered
    )


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("return 5", 5, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('what is wrong')", 1, "what is wrong\n"),
        ("sys.exit(-1)", 255, ""),
        ("raise ValueError('bad')", 1, "ValueError: bad\n"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 128 + signal.SIGINT, "KeyboardInterrupt\n"),
        ("threading.Thread(target=time.sleep, args=(1000,)).start(); return 3", 3, ""),
    ],
)
def test_exit_codes(body: str, code: int, stderr: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout) == (code, "handler ran\n"), done.stderr
    assert done.stderr.endswith(stderr) and bool(done.stderr) == bool(stderr)


def test_exit_handlers_have_a_limit() -> None:
    done = run("process_exit._EXIT_HANDLERS_SECONDS = 0.2; atexit.register(time.sleep, 1000); return 4")
    assert done.returncode == 4


def test_an_exit_handler_that_fails_does_not_change_the_exit_code() -> None:
    done = run("atexit.register(lambda: 1 / 0); return 6")
    assert (done.returncode, done.stdout) == (6, "handler ran\n") and "ZeroDivisionError" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_no_success() -> None:
    with open("/dev/full", "w") as full:
        assert run("print(1)", full.fileno()).returncode == 120
        assert run("print(1); return 2", full.fileno()).returncode == 2


def test_leaving_after_an_error_does_not_wait_for_pending_collectives() -> None:
    began = time.monotonic()
    leave_after_error(lambda: time.sleep(30), 0.2)
    assert time.monotonic() - began < 10
    called: list[int] = []
    leave_after_error(lambda: called.append(1))
    assert called == [1]
    leave_after_error(lambda: called.remove(2))  # fails: the error that ends the run is the one to report


def _deepspeed_user(end: str, port: int) -> None:
    import deepspeed_ext

    def main() -> float:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=timedelta(minutes=1)
        )
        dist.all_reduce(torch.ones(1))
        if end == "error":
            raise ValueError("bad")
        if end == "exit":
            sys.exit(7)
        return 1.5

    deepspeed_ext.run_program(main)


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("error", 1), ("exit", 7)])
def test_programs_that_use_deepspeed_ext_alone(end: str, code: int) -> None:
    process = _CONTEXT.Process(target=_deepspeed_user, args=(end, free_port()), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == code


def test_no_rank_aborts_however_it_ends() -> None:
    """Each way once; two hundred endings and those of the training program: tests/campaigns/process_endings.py."""
    words = [sys.executable, "-m", "tests.campaigns.process_endings", "--endings", "10", "--no-training"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split() == ["all", "10", "0", "0"], done.stderr
