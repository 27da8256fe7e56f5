"""Owners of whole matrices: every element once, balanced as far as whole matrices allow, planned fast."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zero.matrix_partition import (
    MatrixPlan,
    ShardMap,
    WholeMatrix,
    matrices_of,
    plan_flat_buffer,
    plan_matrices,
    smallest_load,
)
from deepspeed_ext.zero.partition import BufferLayout, flat_layout

Shapes = dict[str, tuple[tuple[int, ...], int]]


def lay_out(shapes: Shapes, ranks: int, bucket_numel: int) -> BufferLayout:
    return flat_layout([(name, math.prod(shape)) for name, (shape, _) in shapes.items()], ranks, bucket_numel)


side = st.integers(1, 70)
shape = st.tuples(st.lists(st.integers(1, 4), max_size=2), side, side, st.integers(1, 3)).map(
    lambda s: ((*s[0], s[1] * s[3], s[2]), s[3])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(shape, min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 20_000))
def test_every_element_of_every_matrix_lies_once_in_the_shards_and_has_one_owner(
    given: list[tuple[tuple[int, ...], int]], ranks: int, bucket_numel: int
) -> None:
    shapes = {f"w{index}": entry for index, entry in enumerate(given)}
    layout = lay_out(shapes, ranks, bucket_numel)
    plan = plan_flat_buffer(layout, shapes)
    assert len(plan.owners) == len(plan.matrices) and set(plan.owners) <= set(range(ranks))
    end = dict.fromkeys(shapes, 0)
    for matrix in plan.matrices:  # in order: no gap, no overlap
        assert matrix.start == end[matrix.name]
        end[matrix.name] += matrix.numel
    assert end == {name: math.prod(shape) for name, (shape, _) in shapes.items()}
    shard_map, used = ShardMap(layout), set()
    shards = {rank: [bucket.shard_ranges(rank) for bucket in layout.buckets] for rank in range(ranks)}
    for matrix in plan.matrices:
        position = 0
        for part in shard_map.shard_ranges(matrix):
            place = (part.rank, part.bucket, part.offset)
            assert place not in used and part.numel > 0
            used.add(place)
            # What the layout says lies there is this part of this matrix.
            first = matrix.start + position
            position += part.numel
            assert any(
                owned.name == matrix.name
                and owned.start <= first
                and first + part.numel <= owned.stop
                and part.offset - owned.offset == first - owned.start
                for owned in shards[part.rank][part.bucket]
            )
        assert position == matrix.numel
    assert max(plan.loads) <= sum(plan.loads) / ranks + max(matrix.cost for matrix in plan.matrices)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 4))
def test_the_bound_is_one_and_few_matrices_are_spread_well(costs: list[int], ranks: int) -> None:
    best = smallest_load(costs, ranks)
    reachable = [0] * ranks

    def search(index: int) -> int:
        if index == len(costs):
            return max(reachable)
        found = sum(costs)
        for rank in range(ranks):
            reachable[rank] += costs[index]
            if max(reachable) < found:
                found = min(found, search(index + 1))
            reachable[rank] -= costs[index]
        return found

    optimum = search(0)
    plan = plan_matrices([WholeMatrix("w", 0, 1, cost) for cost in costs], [0] * len(costs), ranks)
    assert best <= optimum + 1e-9 <= max(plan.loads) + 2e-9
    assert max(plan.loads) <= optimum * 4 / 3 + 1e-9


def moe(layers: int, width: int, inner: int, experts: int, total_experts: int) -> tuple[Shapes, Shapes]:
    """Dense and expert parameters of a stage of a Mula."""
    dense: Shapes = {}
    expert: Shapes = {}
    for layer in range(layers):
        dense |= {f"{layer}.{name}": ((width, width), 1) for name in "qkvo"}
        dense[f"{layer}.router"] = ((total_experts, width), 1)
        expert[f"{layer}.gate_up"] = ((experts, 2 * inner, width), 2)
        expert[f"{layer}.down"] = ((experts, width, inner), 1)
    return dense, expert


def imbalance(plan: MatrixPlan) -> float:
    return max(plan.loads) * plan.group_size / sum(plan.loads)


def best_imbalance(plan: MatrixPlan) -> float:
    """What no assignment of whole matrices can undercut."""
    smallest = smallest_load((matrix.cost for matrix in plan.matrices), plan.group_size)
    return smallest * plan.group_size / sum(plan.loads)


def moved_share(layout: BufferLayout, plan: MatrixPlan) -> float:
    shard_map = ShardMap(layout)
    held = ((owner, shard_map.shard_ranges(matrix)) for matrix, owner in zip(plan.matrices, plan.owners, strict=True))
    return sum(part.numel for owner, parts in held for part in parts if part.rank != owner) / layout.numel


@pytest.mark.parametrize("ranks", [2, 8, 16, 32])
def test_mula_7b_is_balanced_and_its_experts_hardly_move(ranks: int) -> None:
    for shapes, limit in zip(moe(16, 2048, 1024, 64, 64), (0.7, 0.1), strict=True):
        layout = lay_out(shapes, ranks, 1 << 26)
        plan = plan_flat_buffer(layout, shapes)
        assert imbalance(plan) <= 1.05
        assert moved_share(layout, plan) <= limit
        assert layout.padding <= 1e-3 * layout.numel


def test_where_whole_matrices_allow_no_balance_the_plan_reaches_the_bound() -> None:
    dense, expert = moe(8, 3072, 1536, 20, 240)
    for shapes, ranks in ((dense, 1536), (expert, 128)):
        plan = plan_flat_buffer(lay_out(shapes, ranks, 1 << 26), shapes)
        assert imbalance(plan) > 1.05
        assert imbalance(plan) == pytest.approx(best_imbalance(plan))


def test_mula_220b_over_12288_ranks_is_planned_in_under_a_second() -> None:
    """All 8 pipeline stages, both flat buffers, layouts included: what no rank has to do alone."""
    started = time.process_time()
    for _ in range(8):
        dense, expert = moe(8, 3072, 1536, 240 // 12, 240)
        for shapes, ranks in ((dense, 12_288 // 8), (expert, 12_288 // 8 // 12)):
            plan = plan_flat_buffer(lay_out(shapes, ranks, 1 << 26), shapes)
            assert imbalance(plan) == pytest.approx(best_imbalance(plan))
    assert time.process_time() - started < 1.0


def test_shapes_that_are_no_matrices() -> None:
    with pytest.raises(ValueError, match=r"'norm' of shape \(5,\) is not a matrix"):
        matrices_of("norm", (5,))
    assert matrices_of("empty", (0, 4, 4)) == [] and matrices_of("empty", (4, 0)) == []
    assert matrices_of("w", (2, 6, 5), stacked=3) == [WholeMatrix("w", 10 * i, 2, 5) for i in range(6)]
