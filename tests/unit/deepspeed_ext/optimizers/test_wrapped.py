"""Other torch optimizers on shards: as on whole tensors where they are element-wise, refused where they are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.optimizers import Shard, ShardOptimizer, StepScalars, shard_optimizer_for


def gradient(step: int) -> Tensor:
    return torch.randn(30, generator=torch.Generator().manual_seed(step))


class SignWithMomentum(torch.optim.Optimizer):
    """A user's own, with a state of each element and a count of steps."""

    def __init__(self, params: Any, lr: float = 0.1, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "whole": whole})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", 0) * 0.9 + param.grad
                update = state["mean"] / state["step"]
                param.sub_(group["lr"] * (update / update.norm() if group["whole"] else update.sign()))


def resumed(shard: Shard, rule: ShardOptimizer, group: dict[str, Any]) -> Shard:
    again = Shard(shard.master.clone(), torch.empty(0), shard.param.clone())
    again.state = rule.new_state(again, group)
    for kind, value in shard.state.items():
        again.state[kind].copy_(value)
    return again


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adagrad,
        partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
        torch.optim.Rprop,
        torch.optim.RMSprop,
        SignWithMomentum,
    ],
)
def test_shards_are_updated_and_resumed_as_the_whole_tensor_and_a_skipped_step_changes_nothing(kind: Any) -> None:
    whole = torch.nn.Parameter(gradient(99))
    oracle = kind([whole], lr=0.1)
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rule, group = shard_optimizer_for(optimizer, optimizer.param_groups[0]), optimizer.param_groups[0]
    shards = [Shard(part.clone(), torch.empty(0), part.bfloat16()) for part in whole.detach().split(13)]
    for shard in shards:
        shard.state = rule.new_state(shard, group)
    for step in range(1, 5):
        if step == 3:
            rule = shard_optimizer_for(optimizer, group)
            shards = [resumed(shard, rule, group) for shard in shards]
        whole.grad = gradient(step)
        oracle.step()
        for is_skipped in (True, False):
            scalars = StepScalars.of(torch.device("cpu"), step, scale=0.25, skip=is_skipped)
            for shard, part in zip(shards, gradient(step).split(13), strict=True):
                shard.grad = part * (torch.nan if is_skipped else 4)
                rule.update_(shard, group, scalars)
    found = torch.cat([shard.master for shard in shards])
    torch.testing.assert_close(found, whole.detach(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(shard.param, shard.master.bfloat16()) for shard in shards)


def test_what_needs_whole_tensors_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 4))
    for kind, message in (
        (torch.optim.LBFGS, "LBFGS needs whole tensors"),
        (torch.optim.NAdam, r"NAdam keeps \['mu_product'\] for each tensor"),
    ):
        optimizer = kind([param])
        with pytest.raises(ValueError, match=message):
            shard_optimizer_for(optimizer, optimizer.param_groups[0])
    optimizer = torch.optim.Adagrad([{"params": [param], "state_dtype": "bf16"}])
    with pytest.raises(ValueError, match="keeps its states in fp32"):
        shard_optimizer_for(optimizer, optimizer.param_groups[0])
    optimizer = SignWithMomentum([param], whole=True)
    with pytest.raises(ValueError, match="SignWithMomentum is not element-wise: a slice of a tensor is not updated"):
        shard_optimizer_for(optimizer, optimizer.param_groups[0])
