"""Muon on flat shards of several ranks against Muon on whole parameters in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.optimizers import Muon, Shard, StepScalars
from deepspeed_ext.optimizers.muon import ShardMuon
from deepspeed_ext.zero import matrix_exchange
from deepspeed_ext.zero.matrix_exchange import MatrixExchange
from deepspeed_ext.zero.partition import BufferLayout, flat_layout
from tests.helpers import run_distributed

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "experts.gate_up": ((5, 48, 20), 2),
    "q": ((40, 40), 1),
    "k": ((40, 40), 1),
    "router": ((5, 40), 1),
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


@pytest.mark.parametrize(("world", "bucket_numel", "in_place_numel"), [(1, 10**6, 1), (2, 10**6, 1), (3, 3000, 10**9)])
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
