"""The kernels of GPUs against the reference: Triton's also under its interpreter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_ext.optimizers.kernels import kernels_for, reference
from tests.unit.deepspeed_ext.optimizers.cases import CASES, GRID, clone, make_shard, mismatches, run

ROOT = Path(__file__).resolve().parents[5]
PROGRAM = """
from deepspeed_ext.optimizers.kernels import triton_ops
from tests.unit.deepspeed_ext.optimizers.cases import GRID, mismatches
for case, state, grad in GRID:
    bad = mismatches(triton_ops, case, state, grad, "cpu")
    assert not bad, (case, state, grad, bad)
triton_ops._SHARED_BLOCK = 512  # more blocks than programs
for case, state, grad in GRID[::3]:
    assert not (bad := mismatches(triton_ops, case, state, grad, "cpu", shares_device=True)), (case, state, grad, bad)
print("all equal")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() or torch.xpu.is_available()), reason="no accelerator")
@pytest.mark.parametrize(("case", "state_dtype", "grad_dtype"), GRID)
def test_gpu_kernels_equal_the_reference(case: str, state_dtype: str, grad_dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "xpu"
    kernels = kernels_for(device)
    assert kernels is not reference
    for shares_device in (False, True):
        assert not mismatches(kernels, case, state_dtype, grad_dtype, device, shares_device=shares_device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_never_waits_for_the_device() -> None:
    """Synchronizing calls raise in this mode."""
    from deepspeed_ext.optimizers import StepScalars

    kernels = kernels_for("cuda")
    shards = {case: make_shard(CASES[case][2], "fp32", torch.bfloat16, "cuda") for case in CASES}
    scalars = StepScalars.of(torch.device("cuda"), 1)
    for case, shard in shards.items():
        run(kernels, case, clone(shard), scalars)  # compiled before
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case, shard in shards.items():
            run(kernels, case, shard, scalars)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_triton_kernels_under_the_interpreter() -> None:
    """Runs where triton is installed, also in a folder "triton" of the environment."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(sys.prefix) / 'triton'}"}
    words = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    probe = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip("triton is not installed")
    if tuple(map(int, probe.stdout.split(".")[:2])) < (3, 5):  # of torch 2.8; compiled kernels are not concerned
        pytest.skip("this Triton's interpreter takes no loop that begins at a program's number, with numpy 2.4")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr[-3000:]
