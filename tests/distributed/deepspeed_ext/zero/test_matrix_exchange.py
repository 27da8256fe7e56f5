"""Muon on flat shards of several ranks against Muon on whole parameters in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.optimizers import MatrixOptimizer, Muon, Shard, StepScalars, WholeMatrices
from deepspeed_ext.optimizers.muon import ShardMuon
from deepspeed_ext.zero import matrix_exchange
from deepspeed_ext.zero.flat_buffer import param_matrices
from deepspeed_ext.zero.matrix_exchange import MatrixExchange
from deepspeed_ext.zero.matrix_partition import ParamMatrices, matrices_of, plan_flat_buffer
from deepspeed_ext.zero.partition import BufferLayout, flat_layout
from tests.helpers import run_distributed

# In this order, over three ranks, one whole matrix travels to an owner that has another one at the same place of its
# own shard.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "experts.gate_up": ((5, 48, 20), 2),
    "q": ((40, 40), 1),
    "router": ((5, 40), 1),
    "k": ((40, 40), 1),
    "experts.down": ((5, 20, 24), 1),
    "wide": ((8, 300), 1),
}
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
STEPS = 4


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}


def shards_of(layout: BufferLayout, rank: int, tensors: dict[str, Tensor]) -> list[Tensor]:
    """This rank's part of every bucket."""
    shards = []
    for bucket in layout.buckets:
        shard = torch.zeros(bucket.shard_numel)
        for part in bucket.shard_ranges(rank):
            shard[part.where] = tensors[part.name].reshape(-1)[part.start : part.stop]
        shards.append(shard)
    return shards


def train(rank: int, world: int, bucket_numel: int, in_place_numel: int) -> tuple[dict[str, Tensor], list[Tensor], int]:
    matrix_exchange._IN_PLACE_NUMEL = in_place_numel
    layout = flat_layout([(name, math.prod(shape)) for name, (shape, _) in SHAPES.items()], world, bucket_numel)
    exchange = MatrixExchange(layout, SHAPES, rank, dist.group.WORLD if world > 1 else None)
    muon, shard_optimizer = Muon([torch.zeros(2, 2)], **OPTIONS), ShardMuon()
    shards = [Shard(part, torch.empty(0), part.bfloat16(), {}) for part in shards_of(layout, rank, values(seed=0))]
    for shard in shards:
        shard.state = shard_optimizer.new_state(shard, muon.param_groups[0])
    for step in range(1, STEPS + 1):
        for shard, part in zip(shards, shards_of(layout, rank, values(seed=step)), strict=True):
            shard.grad = part * 4
        scalars = StepScalars.of(torch.device("cpu"), step, scale=1 / 4, skip=False)
        shard_optimizer.update_matrices_(shards, exchange, muon.param_groups[0], scalars)
        before = [shard.master.clone() for shard in shards]
        for shard in shards:
            shard.grad = torch.full_like(shard.master, torch.nan)
        scalars = StepScalars.of(torch.device("cpu"), step + 1, scale=math.nan, skip=True)
        shard_optimizer.update_matrices_(shards, exchange, muon.param_groups[0], scalars)
        assert all(torch.equal(shard.master, old) for shard, old in zip(shards, before, strict=True))
    own: dict[str, Tensor] = {}
    for bucket, shard in zip(layout.buckets, shards, strict=True):
        assert torch.equal(shard.param, shard.master.bfloat16())
        for part in bucket.shard_ranges(rank):
            flat = own.setdefault(part.name, torch.full((math.prod(SHAPES[part.name][0]),), torch.nan))
            flat[part.start : part.stop] = shard.master[part.where]
    return own, [shard.master for shard in shards], exchange.travelling_numel


def one_process() -> dict[str, Tensor]:
    params = {name: torch.nn.Parameter(value) for name, value in values(seed=0).items()}
    for name, param in params.items():
        param.stacked_matrices = SHAPES[name][1]  # type: ignore[attr-defined]
    muon = Muon(params.values(), **OPTIONS)
    for step in range(1, STEPS + 1):
        for name, gradient in values(seed=step).items():
            params[name].grad = gradient
        muon.step()
    return {name: param.detach().reshape(-1) for name, param in params.items()}


@pytest.mark.parametrize(
    ("world", "bucket_numel", "in_place_numel"), [(1, 10**6, 1), (2, 10**6, 1), (3, 3000, 1), (3, 3000, 10**9)]
)
def test_shards_equal_one_process(world: int, bucket_numel: int, in_place_numel: int) -> None:
    expected = one_process()
    results = run_distributed(train, world, bucket_numel, in_place_numel)
    for name, value in expected.items():
        parts = [own[name] for own, _, _ in results if name in own]
        covered = torch.stack([~part.isnan() for part in parts]).sum(0)
        assert (covered == 1).all(), name
        merged = torch.stack([part.nan_to_num(0.0) for part in parts]).sum(0)
        assert (merged - value).abs().max() <= 1e-5 * value.abs().max(), name
    assert (results[0][2] > 0) == (world > 1)


def test_twice_the_same_bits() -> None:
    first, second = (run_distributed(train, 2, 3000, 1) for _ in range(2))
    for (_, masters, _), (_, again, _) in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(masters, again, strict=True))


class ShardWhitened(MatrixOptimizer):
    """A matrix optimizer with a state of another shape than the matrix, as simple as one can be."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"gram": (shape[0], shape[0]), "norm": ()}

    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        updates = [torch.where(scalars.skip != 0, 0.0, shard.grad * scalars.scale) for shard in shards]
        matrices.transform_with_states(updates, whiten, scalars.skip)
        for shard, update in zip(shards, updates, strict=True):
            shard.master.sub_(torch.where(scalars.skip != 0, 0.0, update), alpha=options["lr"])


def whiten(batch_BMN: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    gram_BMM = 0.9 * states["gram"] + batch_BMN @ batch_BMN.mT
    norm_B = states["norm"] + batch_BMN.square().sum((1, 2))
    return gram_BMM @ batch_BMN / norm_B[:, None, None], {"gram": gram_BMM, "norm": norm_B}


PARTS = {
    "experts.gate_up": ParamMatrices((5, 48, 20), 2, 2),
    "q": ParamMatrices((40, 40), 1, 2, by_columns=True),
    "k": ParamMatrices((40, 40), 1, 2),
    "experts.down": ParamMatrices((5, 20, 24), 1, 2, by_columns=True),
}


def whole_values(seed: int) -> dict[str, Tensor]:
    """[matrices, rows, columns] of each parameter."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, param in PARTS.items():
        first, *others = matrices_of(name, *param)
        found[name] = torch.randn(1 + len(others), first.rows, first.columns, generator=generator)
    return found


def local_values(seed: int, part: int) -> dict[str, Tensor]:
    return {
        name: value.chunk(2, dim=2 if PARTS[name].by_columns else 1)[part].reshape(PARTS[name].shape)
        for name, value in whole_values(seed).items()
    }


def train_with_states(rank: int, world: int, bucket_numel: int) -> dict[tuple[str, int], dict[str, Tensor]]:
    """Two steps of ShardWhitened, one skipped between them; each matrix's states, and its own part of the masters."""
    layout = flat_layout([(name, math.prod(one.shape)) for name, one in PARTS.items()], world // 2, bucket_numel)
    exchange, optimizer = MatrixExchange(layout, PARTS, rank, dist.group.WORLD), ShardWhitened()
    exchange.new_states(optimizer, {}, torch.device("cpu"))
    shard, part = divmod(rank, 2)
    shards = [Shard(one, torch.empty(0), one) for one in shards_of(layout, shard, local_values(0, part))]
    for step, skip in ((1, False), (2, True), (3, False)):
        for one, grad in zip(shards, shards_of(layout, shard, local_values(step, part)), strict=True):
            one.grad = torch.full_like(grad, torch.nan) if skip else grad
        scalars = StepScalars.of(torch.device("cpu"), step, skip=skip)
        optimizer.update_matrices_(shards, exchange, {"lr": 0.1}, scalars)
    expected = whole_values(0)
    for gradients in (whole_values(1), whole_values(3)):
        for name, value in reference(gradients).items():
            expected[name] -= 0.1 * value
    for name, value in expected.items():
        expected[name] = value.chunk(2, dim=2 if PARTS[name].by_columns else 1)[part].reshape(-1)
    for bucket, one in zip(layout.buckets, shards, strict=True):
        for found in bucket.shard_ranges(shard):
            torch.testing.assert_close(one.master[found.where], expected[found.name][found.start : found.stop])
    REFERENCE.clear()
    return {(matrix.name, matrix.index): states for matrix, states in exchange.matrix_states()}


REFERENCE: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}


def reference(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The update of whole matrices one by one, with the states in REFERENCE."""
    updates = {name: value.clone() for name, value in gradients.items()}
    for name, value in gradients.items():
        for index, matrix in enumerate(value):
            gram, norm = REFERENCE.get((name, index), (torch.zeros(len(matrix), len(matrix)), torch.zeros(())))
            REFERENCE[name, index] = 0.9 * gram + matrix @ matrix.T, norm + matrix.square().sum()
            updates[name][index] = REFERENCE[name, index][0] @ matrix / REFERENCE[name, index][1]
    return updates


@pytest.mark.parametrize(("world", "bucket_numel"), [(2, 10**6), (4, 3000)])
def test_matrices_cut_over_ranks_have_their_states_at_one_owner(world: int, bucket_numel: int) -> None:
    REFERENCE.clear()
    for step in (1, 3):
        reference(whole_values(step))
    results = run_distributed(train_with_states, world, bucket_numel)
    owned = [key for states in results for key in states]
    assert sorted(owned) == sorted(REFERENCE) and min(len(states) for states in results) > 0
    for states in results:
        for key, found in states.items():
            torch.testing.assert_close(found["gram"], REFERENCE[key][0])
            torch.testing.assert_close(found["norm"], REFERENCE[key][1])


def test_parts_that_do_not_fit() -> None:
    param = torch.nn.Parameter(torch.zeros(8, 6))
    for key, value in {"partition_dim": 0, "partition_count": 2, "partition_stride": 2}.items():
        setattr(param, key, value)
    with pytest.raises(ValueError, match=r"'w' is cut along dim 0 with partition_stride=2; .* with stride 1"):
        param_matrices("w", param)
    param.stacked_matrices = 2  # type: ignore[attr-defined]
    assert param_matrices("w", param) == ParamMatrices((8, 6), 2, 2, False)
    layout = flat_layout([("a", 48), ("b", 48)], 2, 1000)
    with pytest.raises(ValueError, match=r"cut into \[1, 2\] parts"):
        plan_flat_buffer(layout, {"a": ParamMatrices((8, 6)), "b": ParamMatrices((8, 6), 1, 2)})
