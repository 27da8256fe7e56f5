"""Progress of commands: lines in a pipe, a bar on a terminal, from the first second on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.optimus.platform import progress as module
from megatron.optimus.platform.progress import Progress
from tests.unit.commands.test_preprocess import BYTES, command

_BAR = """
import logging, sys, time
from megatron.optimus.platform.progress import Progress, StderrHandler
logging.basicConfig(handlers=[StderrHandler()])
with Progress("work") as progress:
    time.sleep(0.3)
    progress.update(0.25, "250 documents")
    logging.warning("a warning")
    time.sleep(0.5)
print("the result")
"""


def test_lines_in_a_pipe(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.15)
    with Progress("work") as progress:
        time.sleep(0.1)
        progress.update(0.5, "7 documents")
        time.sleep(0.2)
        progress.update(None, "choosing")
        assert progress.line() == "work: choosing, 0:00 elapsed"
    time.sleep(0.2)
    out, lines = capfd.readouterr()
    assert not out
    assert lines.splitlines() == [
        "work: starting, 0:00 elapsed",
        "work: 50.0 %, 7 documents, 0:00 elapsed, 0:00 left",
    ]


def test_a_command_says_something_in_its_first_seconds(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    source.write_bytes(b'{"text": "some words"}\n' * 2_000_000)
    arguments = ("--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--append-eod", "--workers", 1)
    process = subprocess.Popen(command("tools/preprocess_data.py", *arguments), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("preprocess: ")
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def test_a_bar_on_a_terminal() -> None:
    pytest.importorskip("rich")
    main, other = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", _BAR], stderr=other, stdout=subprocess.PIPE, text=True)
    os.close(other)
    assert process.communicate(timeout=60)[0] == "the result\n"
    shown = b""
    while chunk := _read(main):
        shown += chunk
    assert b"25%" in shown and b"250 documents" in shown and b"a warning\r\n" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_a_closed_stderr_does_not_end_a_command(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "some words"}\n' * 300_000)
    arguments = command("tools/preprocess_data.py", "--input", source, "--output-prefix", tmp_path / "x", *BYTES)
    result = subprocess.run(
        ["bash", "-c", '"$@" 2>&-', "bash", *arguments], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0 and "300000 documents" in result.stdout
