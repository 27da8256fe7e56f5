"""How to add an optimizer: one of each kind, each with all of its code here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from deepspeed_ext.ds_config import build_torch_optimizer
from deepspeed_ext.optimizers import (
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    MatrixOptimizer,
    Shard,
    ShardableOptimizer,
    ShardOptimizer,
    StepScalars,
    WholeMatrices,
    own_optimizer,
    shard_optimizer_for,
)
from tests.unit.deepspeed_ext.optimizers.sharded import Shards, gradients


class ShardMean(ShardOptimizer):
    """Steps along the plain mean of all gradients so far: an element-wise optimizer."""

    state_kinds = ("mean",)

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        mean = self.read_state(shard, "mean")
        mean = mean + (shard.grad.float() * scalars.scale - mean) / scalars.step
        master = shard.master - options["lr"] * mean
        self.write_state(shard, "mean", torch.where(scalars.skip != 0, self.read_state(shard, "mean"), mean))
        shard.master.copy_(torch.where(scalars.skip != 0, shard.master, master))
        shard.param.copy_(shard.master)


class Mean(ShardableOptimizer):
    rule = ShardMean

    def __init__(self, params: Any, lr: float, state_dtype: str = "fp32") -> None:
        super().__init__(params, {"lr": lr, "state_dtype": state_dtype})


class ShardNormalized(MatrixOptimizer):
    """Steps along each matrix's gradient divided by its Frobenius norm: a matrix optimizer without states."""

    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        updates = [torch.where(scalars.skip != 0, 0.0, shard.grad.float() * scalars.scale) for shard in shards]
        matrices.transform(updates, lambda batch: torch.nn.functional.normalize(batch.flatten(1)).view_as(batch))
        for shard, update in zip(shards, updates, strict=True):
            shard.master.sub_(update, alpha=options["lr"])
            shard.param.copy_(shard.master)


class Normalized(ShardableOptimizer):
    rule = ShardNormalized

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize(("state_dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2), ("int8", 0.1)])
def test_an_elementwise_optimizer_works_alone_and_on_shards_with_every_state_dtype(
    state_dtype: str, tolerance: float
) -> None:
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


def test_a_matrix_optimizer_updates_whole_matrices() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 8, 5, dtype=torch.bfloat16))  # three matrices
    param.grad = torch.randn(3, 8, 5).bfloat16()
    optimizer = Normalized([param], lr=2.0)
    optimizer.step()
    expected = -2 * param.grad.float() / param.grad.float().norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(optimizer.state[param]["master"].view_as(param), expected)
    assert torch.equal(param, expected.bfloat16())
    shard_optimizer = shard_optimizer_for(optimizer, optimizer.param_groups[0])
    with pytest.raises(TypeError, match="ShardNormalized updates whole matrices; use update_matrices_"):
        shard_optimizer.update_(Shard(*(torch.zeros(2),) * 3), {}, StepScalars.of(torch.device("cpu"), 1))


def test_a_configuration_names_what_the_folder_has() -> None:
    assert {"Adam", "AdamW", "SGD", "Lion"} <= OPTIMIZERS.keys() and "Muon" not in OPTIMIZERS
    config = {"optimizer": {"type": "lION", "params": {"lr": 0.1}}}
    built = build_torch_optimizer(config, [torch.nn.Parameter(torch.zeros(3))])
    assert type(built) is OPTIMIZERS["Lion"] and built.param_groups[0]["lr"] == 0.1


def test_names_of_options_have_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN_OPTIMIZERS, "PlainMean", Mean)
    assert own_optimizer("plain-mean") is Mean and own_optimizer("muon") is OWN_OPTIMIZERS["Muon"]
    with pytest.raises(ValueError, match=r"optimizer 'muons' is not one of .*Muon.*; did you mean Muon"):
        own_optimizer("muons")
