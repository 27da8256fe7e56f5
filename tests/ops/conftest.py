"""The compiled operations are built before their tests if a compiler is there and they are missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
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
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of tuned tiles, in a folder that is not there yet, for a GPU of Hopper."""
    from megatron.optimus.ops.triton import tiles
    from tests.ops.tile_cases import H200

    monkeypatch.setenv("OPTIMUS_TILES", str(tmp_path / "cache" / "tiles.json"))
    monkeypatch.setattr(tiles, "hardware", lambda device: H200)
    tiles.set_tables(None)
    yield tmp_path / "cache" / "tiles.json"
    tiles.set_tables(None)


@pytest.fixture
def default_work_sizes():
    from megatron.optimus.ops import sycl

    sycl.set_work_sizes()
    yield
    sycl.set_work_sizes()
