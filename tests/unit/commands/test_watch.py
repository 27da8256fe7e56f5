"""The command that watches a run in the terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.optimus import cli
from tests.unit.report.conftest import line

ROOT = Path(__file__).parents[3]
OLD = ROOT / "tests" / "fixtures" / "checkpoint_v0_5"


def test_the_command(make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    for folder in (run, OLD):
        assert cli.main(["watch", str(folder), "--once"]) == 0
        assert "experts" in capsys.readouterr().out
    for words, message in (([str(tmp_path / "none")], "no such folder"), ([str(run), "--log", "none"], "no such file")):
        assert cli.main(["watch", *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_on_a_terminal_it_follows_the_run_until_control_c(make_run: Callable[..., Path]) -> None:
    run = make_run()
    master, slave = pty.openpty()
    words = [sys.executable, str(ROOT / "tools" / "watch.py"), str(run), "--interval", "1"]
    size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **size})
    os.close(slave)

    def read_until(text: str) -> None:
        seen, deadline = "", time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline and process.poll() is None, seen[-3000:]
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 1 << 16).decode(errors="replace")

    read_until("step 12 of 20")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(13)) + "\n")
    read_until("step 13 of 20")
    process.send_signal(signal.SIGINT)
    code = process.wait(20)
    os.close(master)
    assert code == 0
