"""The example of a foreign model runs as its first line says and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_transformers_moe_learns_through_deepspeed_ext_alone() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "examples/local/transformers_moe.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    assert "optimizer: EP-aware ZeRO of deepspeed_ext" in output
    losses = [float(value) for value in re.findall(r"step \d+ loss ([0-9.]+)", output)]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0], losses
    assert "megatron" not in (ROOT / "examples/local/transformers_moe.py").read_text()
