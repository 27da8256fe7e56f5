"""The kernels of a CPU against the reference."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.optimizers.kernels import cpu
from tests.unit.deepspeed_ext.optimizers.cases import GRID, mismatches


@pytest.mark.parametrize(("case", "state_dtype", "grad_dtype"), GRID)
def test_cpu_kernels_equal_the_reference(
    case: str, state_dtype: str, grad_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CHUNK", 1024)  # several chunks, the last one partial
    assert not mismatches(cpu, case, state_dtype, grad_dtype, "cpu")
