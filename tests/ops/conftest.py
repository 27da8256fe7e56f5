"""The compiled operations are built before their tests if a compiler is there and they are missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


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


@pytest.fixture
def default_work_sizes():
    from megatron.optimus.ops import sycl

    sycl.set_work_sizes()
    yield
    sycl.set_work_sizes()
