"""The kernels of a CPU against the reference, in blocks against the whole shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import blocks
from deepspeed_ext.optimizers.kernels import cpu
from tests.unit.deepspeed_ext.optimizers.cases import GRID, mismatches


@pytest.mark.parametrize(("case", "state_dtype", "grad_dtype"), GRID)
def test_cpu_kernels_equal_the_reference(
    case: str, state_dtype: str, grad_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_blocks(name: str) -> Any:
        def update(*arguments: Any) -> None:
            with monkeypatch.context() as small:
                small.setattr(blocks, "CPU_BLOCK", 1024)  # several blocks, the last one partial
                getattr(cpu, name)(*arguments)

        return update

    module: Any = SimpleNamespace(**{name: in_blocks(name) for name in cpu.__all__})
    assert not mismatches(module, case, state_dtype, grad_dtype, "cpu")
