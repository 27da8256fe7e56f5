"""A rank makes its own few groups only, however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.optimus.config.layout import AXES
from megatron.optimus.config.schema import ParallelConfig
from megatron.optimus.platform.mesh import Mesh

WORLD = 12288


@pytest.fixture(params=[0, WORLD - 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    dist.destroy_process_group()


def test_the_groups_of_one_rank_of_12288(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        assert options == {"use_local_synchronization": True} and rank in ranks
        made.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=8,
        context_parallel_size=2,
        expert_model_parallel_size=12,
    )
    mesh = Mesh(config, rank=rank, world_size=WORLD, local_world_size=12)
    assert len(made) <= len(AXES)
    sizes = dict(
        pp=8, dp=384, cp=2, tp=2, dense=768, sequence=4, stage=1536, model=16, edp=128, ep=12, etp=1, experts=12
    )
    for axis, size in sizes.items():
        assert mesh.size(axis) == size and mesh.ranks(axis)[mesh.index(axis)] == rank
        group = mesh.group(axis)
        assert (group is None) == (size == 1)
        assert group is None or dist.get_process_group_ranks(group) == mesh.ranks(axis)
    assert mesh.group("ep") is mesh.group("experts")
    within, across = mesh.node_groups("dp")  # of 384 ranks, in nodes of 12
    assert within is not None and across is not None and len(made) <= len(AXES) + 2
    place = mesh.index("dp")
    assert dist.get_process_group_ranks(within) == mesh.ranks("dp")[place // 12 * 12 :][:12]
    assert dist.get_process_group_ranks(across) == mesh.ranks("dp")[place % 12 :: 12]
    alone = mesh.group_or_self("etp")
    assert dist.get_process_group_ranks(alone) == [rank] and mesh.group_or_self("etp") is alone
