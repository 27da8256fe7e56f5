"""The grid of ranks: both views, as pure arithmetic."""

from __future__ import annotations

import itertools

import pytest

from megatron.optimus.config.layout import AXES, Layout
from megatron.optimus.config.schema import ParallelConfig


def layout(world_size: int, **sizes: int) -> Layout:
    return Layout.from_config(ParallelConfig(**sizes), world_size)


def test_two_views_of_eight_ranks() -> None:
    grid = layout(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=4)
    assert (grid.pp, grid.dp, grid.cp, grid.tp, grid.ep, grid.edp) == (2, 2, 1, 2, 4, 1)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_experts_use_neighbours_and_replicas_are_strided() -> None:
    grid = layout(8, expert_model_parallel_size=2)
    assert grid.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("edp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.groups("dense") == [list(range(8))]


@pytest.mark.parametrize("tp, pp, cp, ep", list(itertools.product([1, 2], [1, 2, 3], [1, 2], [1, 2, 4])))
def test_every_axis_holds_every_rank_once(tp: int, pp: int, cp: int, ep: int) -> None:
    grid = layout(
        24,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
    )
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(24)), axis
        assert len({len(group) for group in groups}) == 1
    # experts never leave their pipeline stage
    stage = {rank: number for number, ranks in enumerate(zip(*grid.groups("pp"), strict=True)) for rank in ranks}
    for group in grid.groups("ep") + grid.groups("edp"):
        assert len({stage[rank] for rank in group}) == 1


def test_the_paper_layout_of_220b_keeps_experts_in_a_node() -> None:
    grid = layout(3072, pipeline_model_parallel_size=8, expert_model_parallel_size=12)
    assert (grid.edp, grid.ep, grid.pp) == (32, 12, 8)
    assert all(group[0] // 12 == group[-1] // 12 for group in grid.groups("ep"))


def test_split_experts_and_joined_axes() -> None:
    grid = layout(8, tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2,
                  expert_tensor_parallel_size=2)  # fmt: skip
    assert (grid.edp, grid.ep, grid.etp) == (2, 2, 2)
    assert grid.groups("etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("experts") == grid.groups("sequence") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.groups("stage") == [list(range(8))]
    assert grid.groups("dense") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for axis in AXES:
        assert grid.group_of(axis, 5) == next(group for group in grid.groups(axis) if 5 in group)
