"""The products' kernels compiled for GPUs that are not here: shared memory as tiles.py counts it, and wide loads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.ops.triton.candidates import CANDIDATES
from megatron.optimus.ops.triton.tiles import Hardware, shared_bytes
from tests.ops.test_triton_interpreted import BESIDE, ROOT

MACHINES = {
    80: Hardware("Ampere", 108, 166912, has_tma=False, keeps_last_stage=False),
    90: Hardware("Hopper", 132, 232448, has_tma=True, keeps_last_stage=True),
    120: Hardware("Blackwell, small", 170, 101376, has_tma=True, keeps_last_stage=False),
}


AMD = {"_up_swiglu", "_rows_times_weight", "_weight_gradient"}  # products
BESIDE_PRODUCTS = {"_scan", "_tiles", "_place", "_adam", "_lion", "_sgd", "_log_sum_exp", "_silu_mul"}
needs_triton = pytest.mark.skipif(
    not BESIDE.is_dir() and importlib.util.find_spec("triton") is None,
    reason="triton is not installed: pip install --no-deps --target <venv>/triton -r requirements-triton.txt",
)


def compiled(tmp_path: Path, *words: str) -> list[list[Any]]:
    path = os.pathsep.join([str(ROOT), str(BESIDE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", *words]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


@needs_triton
def test_every_kernel_of_a_step_compiles_for_an_amd_gpu(tmp_path: Path) -> None:
    """In shared memory that it has, without spilling, with matrix instructions and wide loads in the products."""
    found = compiled(tmp_path, "tests.ops.compile_for_amd")
    assert {name for name, *_ in found} >= AMD | BESIDE_PRODUCTS
    for name, shared, spilled, products, wide_loads, narrow_loads in found:
        assert shared <= 65536 and spilled == 0, (name, shared, spilled)
        if name in AMD:
            assert products > 0 and wide_loads > 0, (name, products, wide_loads)
        if name in AMD - {"_rows_times_weight"}:  # whose backward reads weights 2 bytes at a time: untransposed
            assert narrow_loads == 0, (name, narrow_loads)


@needs_triton
def test_compiled_for_three_architectures(tmp_path: Path) -> None:
    found = compiled(tmp_path, "tests.ops.compile_kernels", *map(str, MACHINES))
    assert len(found) == 18
    for architecture, kernel, place, shared, narrow_loads, copies_ahead, products in found:
        where = f"{kernel} {CANDIDATES[kernel][place]} on {architecture}: {shared} bytes"
        machine = MACHINES[architecture]
        tiles = CANDIDATES[kernel][place]
        counted = shared_bytes(kernel, tiles, machine)
        by_rows = tiles.rows * tiles.cols if kernel == "up_swiglu" else 0
        assert shared <= counted and products > 0, f"{where}, counted {counted}"
        if machine.has_tma:
            assert counted - shared <= 1024 + by_rows, f"{where}, counted {counted}"
        else:
            assert narrow_loads == 0 and copies_ahead > 0, f"{where}: {narrow_loads} loads of 2 bytes"
