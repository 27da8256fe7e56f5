"""The products' kernels compiled for GPUs that are not here: shared memory as tiles.py counts it, and wide loads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.ops.triton.candidates import CANDIDATES
from megatron.optimus.ops.triton.tiles import Hardware, shared_bytes
from tests.ops.test_triton_interpreted import BESIDE, ROOT

MACHINES = {
    80: Hardware("Ampere", 108, 166912, has_tma=False, keeps_last_stage=False),
    90: Hardware("Hopper", 132, 232448, has_tma=True, keeps_last_stage=True),
    120: Hardware("Blackwell, small", 170, 101376, has_tma=True, keeps_last_stage=False),
}


@pytest.mark.skipif(
    not BESIDE.is_dir() and importlib.util.find_spec("triton") is None,
    reason="triton is not installed: pip install --no-deps --target <venv>/triton -r requirements-triton.txt",
)
def test_compiled_for_three_architectures(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(BESIDE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.ops.compile_kernels", *map(str, MACHINES)]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
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
