"""Out of memory, wherever it happens, ends a run in one line: the part, the bytes, and what would fit."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import start_program
from tests.integration.conftest import TINY
from tests.integration.out_of_memory_program import PARTS

PROGRAM = "tests.integration.out_of_memory_program"
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="forked ranks, on the CPU")


LARGE = "--micro-batch-size 512 --global-batch-size 512 --eval-interval 0 --train-iters 2"


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("error")]


@pytest.mark.parametrize("part", list(PARTS))
def test_each_part_ends_in_one_line(tmp_path: Path, tokens: Path, part: str) -> None:
    words = [*TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens)]
    done = start_program(PROGRAM, [part, *words], 1, timeout=240)
    assert done.returncode == (3 if part == "save" else 2), done.stderr[-3000:]  # 3: a failed save is tried again
    [line] = errors(done.stderr)
    assert "Traceback" not in done.stderr and PARTS[part][1] in line
    assert re.search(r"asked for 2\.00 GiB of host memory, \d+\.\d\d GiB are free and this process holds \d", line)
    if part not in ("copies", "save"):  # errors of checkpoints, which have a remedy of their own
        assert re.search(r"0\.\d GiB are planned of \d+\.\d usable, so something else may hold memory there$", line), (
            line
        )


def test_one_rank_ends_the_other(tmp_path: Path, tokens: Path) -> None:
    words = [*TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens)]
    began = time.monotonic()
    done = start_program(PROGRAM, ["step@1", *words], 2, timeout=240)
    own, others = [[e for e in errors(done.stderr) if ("out of memory" in e) is is_own] for is_own in (True, False)]
    assert len(own) == 1 and own[0].startswith("error on rank 1: out of memory in a training step: asked for 2.00 GiB")
    assert all("another rank has ended" in line for line in others) and "Traceback" not in done.stderr
    assert done.returncode in (1, 2) and time.monotonic() - began < 200, "nobody waits for the time-out of collectives"


@pytest.mark.parametrize(
    ("limit", "options", "part"),
    [
        (400, "--hidden-size 64 --num-experts 64 --moe-ffn-hidden-size 40000", "building the model"),
        (600, f"{LARGE} --hidden-size 256 --num-layers 8", "a training step"),
    ],
)
def test_real_limits(tmp_path: Path, tokens: Path, limit: int, options: str, part: str) -> None:
    words = [*TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens), *options.split()]
    done = start_program(PROGRAM, [f"limit:{limit}", *words], 1, timeout=240)
    assert done.returncode == 2, done.stderr[-3000:]
    [line] = errors(done.stderr)
    assert line.startswith(f"error: out of memory in {part}: asked for ") and "Traceback" not in done.stderr
    assert "would fit: --micro-batch-size" in line or "makes it fit 1 device" in line


def test_the_traceback_is_shown_on_request(tmp_path: Path, tokens: Path) -> None:
    words = [*TINY, "--run-dir", str(tmp_path), "--data-path", str(tokens)]
    done = start_program(PROGRAM, ["model+traceback", *words], 1, timeout=240)
    assert done.stderr.count("Traceback") == 2 and "in build_model" in done.stderr, "torch's error and ours"
    assert done.returncode == 2 and len(errors(done.stderr)) == 1
