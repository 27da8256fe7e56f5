"""The Triton kernels on the CPU under Triton's interpreter, where triton is installed (fp16: its dot has no bf16)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from megatron.optimus import ops
from tests.ops.cases import CASES, TOLERANCE, expected, make_inputs, mismatches, values_and_gradients
ops.set_backend("triton")
for name in ("one_token", "odd_widths", "all_to_one", "empty_experts", "none_local", "some_foreign"):
    case = CASES[name]
    inputs = make_inputs(case, torch.float16)
    bad = mismatches(values_and_gradients(ops.moe_mlp, inputs), expected(inputs), TOLERANCE[torch.float16])
    assert not bad, (name, bad)
"""


@pytest.mark.skipif(
    tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason="triton 3.6 cannot interpret this numpy",
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_case_under_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=env, cwd=ROOT, check=True)
