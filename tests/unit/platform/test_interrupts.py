"""Ctrl-C before a program can answer it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.platform import interrupts

ROOT = Path(__file__).parents[3]
PROGRAMS = [ROOT / f"megatron/optimus/{name}.py" for name in ("cli", "pretrain", "launch")]
WAIT = "import sys, time; sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(60)"


def interrupted(*calls: str) -> tuple[int, str]:
    """(exit code, standard error) of a process that makes the calls and then gets SIGINT."""
    # Of a job in the background a shell has SIGINT ignored, and so would this process.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    calls = tuple(f"interrupts.{call}()" for call in calls)
    code = "; ".join([begin, "from megatron.optimus.platform import interrupts", *calls, WAIT])
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        return process.wait(30), process.stderr.read() if process.stderr else ""


def test_an_interrupt_ends_silently_and_is_an_exception_again_afterwards() -> None:
    assert interrupted("end_silently") == (-signal.SIGINT, "")
    code, errors = interrupted("end_silently", "raise_again")
    assert code != 0 and "KeyboardInterrupt" in errors


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.end_silently()
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_end_silently_before_they_import_anything_slow(program: Path) -> None:
    before, found, _ = program.read_text(encoding="utf-8").partition("interrupts.end_silently()\n")
    imports = [line for line in before.splitlines() if line.startswith(("import ", "from "))]
    slow = [line for line in imports if "torch" in line or ("megatron" in line and "interrupts" not in line)]
    assert found and slow == []
