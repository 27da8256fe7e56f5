"""Optimizers that need sums over whole tensors: runs of elements, experts as tensors of their own, and one shard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import Shard, StepScalars, own_optimizer, shard_optimizer_for
from deepspeed_ext.optimizers.whole_tensors import runs_in


def test_runs_cover_every_element_once() -> None:
    for start, stop, numel in ((0, 24, 6), (3, 23, 6), (7, 11, 6), (5, 31, 8), (0, 5, 9)):
        found = [
            (run.first + (run.offset + k) // numel, (run.offset + k) % numel, run.start + k)
            for run in runs_in(start, stop, 100, numel, 2)
            for k in range(run.count * run.length)
        ]
        assert found == [(2 + i // numel, i % numel, 100 + i - start) for i in range(start, stop)]


def test_each_expert_is_a_tensor_of_its_own() -> None:
    stack = torch.randn(4, 6, 5)
    whole, parts = nn.Parameter(stack.clone()), [nn.Parameter(part.clone()) for part in stack]
    one, other = (own_optimizer("lamb")(params, lr=0.1) for params in ([whole], parts))
    for step in range(3):
        whole.grad = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(step)) * torch.arange(1, 5).view(
            4, 1, 1
        )
        for part, gradient in zip(parts, whole.grad, strict=True):
            part.grad = gradient.clone()
        one.step()
        other.step()
    torch.testing.assert_close(whole.detach(), torch.stack([part.detach() for part in parts]))


@pytest.mark.parametrize("name", ["lamb", "mars", "lars", "cautious-adamw", "adafactor"])
def test_a_scalar_is_a_vector_of_one_element(name: str) -> None:
    scalar, vector = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([2.0]))
    for param in (scalar, vector):
        optimizer = own_optimizer(name)([param], lr=0.1)
        for gradient in (0.5, -2.0):
            param.grad = torch.full_like(param, gradient)
            optimizer.step()
    assert scalar.item() == vector.item() != 2.0


@pytest.mark.parametrize("name", ["lamb", "mars", "lars", "cautious-adamw"])
def test_one_shard_has_no_whole_tensors(name: str) -> None:
    optimizer = own_optimizer(name)([torch.zeros(1)])
    shard = Shard(*(torch.zeros(2),) * 3)
    with pytest.raises(TypeError, match="needs sums over whole tensors; use update_tensors_"):
        shard_optimizer_for(optimizer, optimizer.param_groups[0]).update_(
            shard, {}, StepScalars.of(shard.master.device, 1)
        )
