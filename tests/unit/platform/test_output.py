"""Standard output that is closed or full: one line on stderr and exit code 1, for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.cli import COMMANDS
from tests.helpers import start_program

ROOT = Path(__file__).resolve().parents[3]
FULL = "error: standard output cannot be written: No space left on device\n"
CLOSED = "error: standard output cannot be written: Bad file descriptor\n"
if not Path("/dev/full").exists():
    pytest.skip("needs /dev/full", allow_module_level=True)


def run(words: list[str], redirection: str, *, unbuffered: bool = False) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


STARTED = ("pretrain", "plan", "--version")


@pytest.mark.parametrize("name", STARTED)
def test_a_started_program_says_so(name: str) -> None:
    words = ["-m", "megatron.optimus", name, *(["--help"] if name in COMMANDS else [])]
    assert run(words, ">/dev/full") == (1, FULL)
    assert run(words, ">&-") == (1, CLOSED)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in STARTED])
def test_every_command_says_so(name: str) -> None:
    """The others are forks of a process that has imported torch."""
    done = start_program("megatron.optimus.cli", [name, "--help"], 1, timeout=60, stdout="/dev/full")
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("unbuffered", [False, True])
def test_what_a_command_prints_while_it_works(tmp_path: Path, unbuffered: bool) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n')
    words = ["-m", "megatron.optimus", "preprocess", "--input", str(tmp_path / "text.jsonl"), "--append-eod"]
    words += ["--overwrite"]
    words += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--output-prefix", str(tmp_path / "x")]
    for redirection, line in ((">/dev/full", FULL), (">&-", CLOSED)):
        code, error = run(words, redirection, unbuffered=unbuffered)
        assert code == 1 and error.endswith(line) and error.count("error:") == 1 and "Traceback" not in error
        assert (tmp_path / "x_text_document.idx").exists()


_LOG = """
import contextlib, os, sys
from megatron.optimus.platform.output import checked_output
from megatron.optimus.platform import log
with checked_output(is_needed=False):
    opened = open(sys.argv[1], "w")
    logger = log.setup(0)
    for _ in range(3):
        logger.info("a line")
        print("printed", file=sys.stderr)
    with contextlib.suppress(OSError):
        os.write(1, b"of a library")
opened.close()
sys.stderr.write(open(sys.argv[1]).read())
sys.stderr.flush()
os._exit(0)
"""


def test_a_run_goes_on_without_output(tmp_path: Path) -> None:
    """And what libraries print does not land in the next file that is opened."""
    code, error = run(["-c", _LOG, str(tmp_path / "file")], ">&-")
    lost = "warning: standard output is closed; what would be printed there is lost\n"
    assert (code, error) == (0, lost + "printed\n" * 3)
    code, error = run(["-c", _LOG, str(tmp_path / "file")], ">/dev/full")
    lost = "error: the log cannot be written to standard output: No space left on device\n"
    assert code == 0 and error == lost + "printed\n" * 3
