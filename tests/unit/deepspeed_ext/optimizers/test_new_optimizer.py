"""A new optimizer is one file: all of this one is the first half of this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from deepspeed_ext.optimizers import Shard, ShardableOptimizer, ShardOptimizer, StepScalars, shard_optimizer_for
from tests.unit.deepspeed_ext.optimizers.sharded import Shards, gradients


class MeanRule(ShardOptimizer):
    """Steps along the plain mean of all gradients so far."""

    state_kinds = ("mean",)

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        mean = self.read_state(shard, "mean")
        mean = mean + (shard.grad.float() * scalars.scale - mean) / scalars.step
        master = shard.master - options["lr"] * mean
        self.write_state(shard, "mean", torch.where(scalars.skip != 0, self.read_state(shard, "mean"), mean))
        shard.master.copy_(torch.where(scalars.skip != 0, shard.master, master))
        shard.param.copy_(shard.master)


class Mean(ShardableOptimizer):
    def __init__(self, params: Any, lr: float, state_dtype: str = "fp32") -> None:
        super().__init__(params, {"lr": lr, "state_dtype": state_dtype})

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        return MeanRule()


@pytest.mark.parametrize(("state_dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2), ("int8", 0.1)])
def test_it_works_alone_and_on_shards_with_every_state_dtype(state_dtype: str, tolerance: float) -> None:
    grads = gradients(1000, 5)
    param = torch.nn.Parameter(torch.zeros(1000))
    alone = Mean([param], lr=0.1, state_dtype=state_dtype)
    group = alone.param_groups[0]
    shards = Shards(shard_optimizer_for(alone, group), group, torch.zeros(1000), cut=256, param_dtype=torch.bfloat16)
    expected, mean = torch.zeros(1000), torch.zeros(1000)
    for step, gradient in enumerate(grads, start=1):
        param.grad = gradient.clone()
        alone.step()
        shards.update(gradient * 2, scale=0.5)
        mean += (gradient - mean) / step
        expected -= 0.1 * mean
    size = expected.abs().max()
    assert (param - expected).abs().max() < tolerance * size
    assert (shards.master() - expected).abs().max() < tolerance * size
