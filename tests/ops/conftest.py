"""The compiled operations are built before their tests if a compiler is there and they are missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.targets import INTERPRETED


def pytest_configure() -> None:
    if importlib.util.find_spec("megatron.optimus.ops._C") is None:
        root = Path(__file__).resolve().parents[2]
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=root, check=True)
        importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def _auto_backend():
    from megatron.optimus import ops

    yield
    ops.set_backend("auto")


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _many_rows_a_program():
    """The interpreter takes as long for a program of two rows as of 64, and tests/ops/test_autotune.py tries every
    number of rows that a GPU may have."""
    from megatron.optimus.ops.triton.candidates import CANDIDATES, Tiles

    before = CANDIDATES["swiglu_backward"]
    CANDIDATES["swiglu_backward"] = (Tiles(64, 1024, 0, 8, 1, 1), *before)
    yield
    CANDIDATES["swiglu_backward"] = before


@pytest.fixture
def default_work_sizes():
    from megatron.optimus.ops import sycl

    sycl.set_work_sizes()
    yield
    sycl.set_work_sizes()
