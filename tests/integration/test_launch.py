"""The local launcher: exit codes, and no rank left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatron.optimus.launch import main, run_ranks
from tests.integration.conftest import environment


def ranks(program: str, count: int = 3) -> int:
    return run_ranks([sys.executable, "-c", program], count)


def test_every_rank_gets_its_place() -> None:
    code = (
        "import os; e = os.environ; assert e['WORLD_SIZE'] == e['LOCAL_WORLD_SIZE'] == '3'; "
        "assert e['RANK'] == e['LOCAL_RANK'] in '012'; int(e['MASTER_PORT']); e['MASTER_ADDR']"
    )
    assert ranks(code) == 0


def test_one_failure_ends_all_and_gives_its_exit_code() -> None:
    started = time.monotonic()
    assert ranks("import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)") == 7
    assert time.monotonic() - started < 20


def test_a_killed_rank_is_named_and_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks("import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '2' else time.sleep(60)") == 137
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: rank 2 ended with signal SIGKILL and the other")


def test_a_rank_that_explained_itself_is_not_explained_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks("import sys; sys.exit(2)") == 2
    assert capfd.readouterr().err == ""


def test_termination_reaches_the_ranks() -> None:
    rank = "import time; print(1, flush=True); time.sleep(60)"
    start = f"sys.exit(run_ranks({[sys.executable, '-c', rank]}, 2))"
    words = [sys.executable, "-c", f"from megatron.optimus.launch import run_ranks; import sys; {start}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "--nproc-per-node is missing"), (["--nproc-per-node", "0"], "'0'"), (["--nproc-per-node=two"], "'two'")],
)
def test_wrong_command_lines(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err
