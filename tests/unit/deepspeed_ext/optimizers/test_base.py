"""Optimizers alone: experts are matrices of their own, skipped steps change nothing, and runs are resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import OWN_OPTIMIZERS
from deepspeed_ext.optimizers.base import LocalMatrices, Shard, StepScalars
from tests.unit.deepspeed_ext.optimizers.matrix_oracles import values

MATRIX_OPTIMIZERS = ("Muon", "NorMuon", "SOAP", "Shampoo", "GaLore", "Dion")


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_experts_are_matrices_of_their_own_and_idle_ones_stay_finite(name: str) -> None:
    """In one batch or by themselves; one of them never has a gradient. A skipped step changes nothing at all."""
    options = {"weight_decay": 0.0} | ({"rank": 3} if name == "GaLore" else {})
    options |= {"precondition_frequency": 2} if name in ("SOAP", "Shampoo") else {}
    whole = nn.Parameter(values((3, 8, 20), 0))
    parts = [nn.Parameter(one.clone()) for one in whole.detach()]
    together, apart = (OWN_OPTIMIZERS[name](params, lr=0.01, **options) for params in ([whole], parts))
    for step in range(1, 5):
        whole.grad = values((3, 8, 20), step)
        whole.grad[1] = 0
        for part, gradient in zip(parts, whole.grad, strict=True):
            part.grad = gradient.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), torch.stack([p.detach() for p in parts]), rtol=1e-4, atol=1e-5)
    assert torch.equal(whole[1], values((3, 8, 20), 0)[1]) and not torch.equal(whole[0], values((3, 8, 20), 0)[0])
    assert_nothing_changes_when_skipped(together, whole)


def assert_nothing_changes_when_skipped(optimizer: Any, param: nn.Parameter) -> None:
    group, state = optimizer.param_groups[0], optimizer.state[param]
    tensors = {**state["shard"], **state["matrices"], "param": param.detach()}
    before = {kind: tensor.clone() for kind, tensor in tensors.items()}
    assert state["matrices"] or type(optimizer).__name__ == "Muon"
    flat = param.detach().view(-1)
    shard = Shard(flat, torch.full_like(flat, torch.nan), flat, state["shard"])
    scalars = StepScalars.of(param.device, 6, scale=torch.nan, skip=True)  # a step of roots and projectors
    matrices = LocalMatrices(3, (8, 20), state["matrices"])
    optimizer.shard_optimizer(group).update_matrices_([shard], matrices, group, scalars)
    assert all(torch.equal(tensors[kind], value) for kind, value in before.items())


@pytest.mark.parametrize(
    ("name", "state_dtype", "dtype"),
    [
        ("Lion", "int8", torch.float32),
        ("Muon", "int8", torch.bfloat16),
        ("SOAP", "fp32", torch.bfloat16),
        ("ScheduleFreeAdamW", "fp32", torch.bfloat16),
    ],
)
def test_alone_it_resumes_bit_for_bit(name: str, state_dtype: str, dtype: torch.dtype) -> None:
    def steps(optimizer: Any, param: nn.Parameter, numbers: range) -> None:
        for number in numbers:
            param.grad = values((6, 9), number).to(dtype)
            optimizer.step()

    unbroken = nn.Parameter(values((6, 9), 9).to(dtype))
    first = OWN_OPTIMIZERS[name]([unbroken], lr=0.01, state_dtype=state_dtype)
    steps(first, unbroken, range(3))
    resumed = nn.Parameter(unbroken.detach().clone())
    second = OWN_OPTIMIZERS[name]([resumed], lr=0.5, state_dtype=state_dtype)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer, param in ((first, unbroken), (second, resumed)):
        steps(optimizer, param, range(3, 6))
    assert torch.equal(unbroken, resumed) and second.param_groups[0]["lr"] == 0.01
