"""The backend ``ccl`` of oneCCL's bindings, with a stand-in that registers it over gloo; real oneCCL was not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.config.choices import DistributedBackend
from tests.integration.conftest import ROOT, TINY, write_corpus

# As the bindings do it, by torch's own function.
STAND_IN = """
import torch.distributed as dist
def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
dist.Backend.register_backend("ccl", make, devices=["cpu", "xpu"])
"""


@pytest.mark.parametrize("backend", [DistributedBackend.CCL, DistributedBackend.AUTO])
def test_two_ranks_train_where_the_bindings_are_installed(backend: DistributedBackend, tmp_path: Path) -> None:
    """Over ccl where it is asked for, else over gloo. DeepSpeed, which sees the module too, builds nothing."""
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text(STAND_IN)
    prefix = write_corpus(tmp_path / "counting")
    words = [*TINY, "--data-path", str(prefix), "--train-iters", "2", "--expert-model-parallel-size", "2"]
    words += ["--distributed-backend", backend.value, "--run-dir", str(tmp_path / "run"), "--save-interval", "0"]
    # Processes of their own: those that are forked for other tests have imported DeepSpeed without the module.
    command = [sys.executable, "-m", "megatron.optimus", "launch", "--nproc-per-node", "2", *words]
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    used = "ccl; oneccl_bindings_for_pytorch (collectives)" if backend is DistributedBackend.CCL else "gloo"
    assert f"device cpu, collectives by {used}\n" in done.stdout
    assert "step=2 loss=" in done.stdout
