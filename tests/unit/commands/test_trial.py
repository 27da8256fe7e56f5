"""A trial of lr-find or of a sweep: what is started, its exit code, and a request to stop that reaches it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.optimus.commands import trial
from megatron.optimus.config.schema import ConfigError

_SHELL = """#!/bin/sh
echo "$@"
trap 'exit 7' TERM
case $* in *wait*) touch "$FOLDER/ready"; while :; do sleep 0.02; done;; *killed*) kill -9 $$;; esac
exit 3
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that stands for the interpreter: it prints its words, and waits or ends as they say."""
    program = tmp_path / "python"
    program.write_text(_SHELL)
    program.chmod(0o700)
    monkeypatch.setattr(trial.sys, "executable", str(program))
    monkeypatch.setenv("FOLDER", str(tmp_path))


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(("num_ranks", "words"), [(None, "pretrain --lr 1"), (2, "launch --nproc-per-node 2 --lr 1")])
def test_the_program_its_output_and_its_code(tmp_path: Path, num_ranks: int | None, words: str) -> None:
    folder = tmp_path / "sweep" / "run"
    assert trial.run_trial(["--lr", "1"], folder, num_ranks) == (3, False)
    assert (folder / trial.LOG).read_text() == f"-m megatron.optimus {words}\n"
    assert trial.run_trial(["killed"], folder, num_ranks) == (128 + signal.SIGKILL, False)
    assert len((folder / trial.LOG).read_text().splitlines()) == 2  # of both


@pytest.mark.usefixtures("python")
def test_a_request_to_stop_reaches_the_trial(tmp_path: Path) -> None:
    def stop() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert trial.run_trial(["wait"], tmp_path / "run", None) == (7, True)
    thread.join()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run cannot be written: Not a directory; name another --run-dir"):
        trial.run_trial([], tmp_path / "file" / "run", None)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("starting\nerror: lr=x\nerror: ended\nbye\n", "ended"),
        ("starting\nkilled\n\n", "killed"),
        ("\n", "it printed nothing"),
    ],
)
def test_the_last_error(tmp_path: Path, output: str, expected: str) -> None:
    (tmp_path / trial.LOG).write_text(output)
    assert trial.last_error(tmp_path) == expected
