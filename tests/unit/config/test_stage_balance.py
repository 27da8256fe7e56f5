"""Layers balanced over stages: no split has a faster slowest rank, by count and against all splits."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.config.stages import layers_of_stages, stages_of_rank
from tests.unit.config.test_stages import LAYER, sizes


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.floats(0, 4), st.booleans())
def test_no_split_of_layers_alike_has_a_faster_slowest_rank(
    pp: int, chunks: int, more: int, head: float, v: bool
) -> None:
    """Against the bound by counting: whole layers dealt to ranks, at least one a stage."""
    chunks, head = 2 if v else chunks, round(head * LAYER) / LAYER
    split = sizes(pp * chunks + more, pp, chunks=chunks, v_shape=v, head=head)
    last = next(rank for rank in range(pp) if pp * chunks - 1 in stages_of_rank(rank, pp, chunks, v_shape=v))

    def slowest(with_head: int) -> float:
        others = -(-(pp * chunks + more - with_head) // (pp - 1)) if pp > 1 else 0
        return max(with_head + head, others)

    most = pp * chunks + more - (pp - 1) * chunks
    best = min(slowest(layers) for layers in (range(chunks, most + 1) if pp > 1 else [most]))
    loads = [sum(split[stage] for stage in stages_of_rank(rank, pp, chunks, v_shape=v)) for rank in range(pp)]
    assert max(load + head * (rank == last) for rank, load in enumerate(loads)) == pytest.approx(best)


PLACEMENTS = [(1, 1, False), (2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (3, 2, False)]


PLACEMENTS += [(2, 3, False), (2, 2, True), (3, 2, True), (4, 2, True)]  # pipeline ranks, chunks, V shape


def loads_of(costs: list[int], ends: list[int], head: int, ranks: list[list[int]]) -> list[int]:
    """What the ranks have to do when the stages end at these layers."""
    stages = [sum(costs[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    stages[-1] += head
    return [sum(stages[stage] for stage in mine) for mine in ranks]


def every_split(num_layers: int, num_stages: int, first: int | None, last: int | None) -> list[list[int]]:
    """The ends of the stages, of every split with a layer or more a stage."""
    splits = [[*inner, num_layers] for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]
    return [
        ends
        for ends in splits
        if ends[0] == (first or ends[0]) and num_layers - [0, *ends][-2] == (last or num_layers - [0, *ends][-2])
    ]


@pytest.mark.parametrize(("pp", "chunks", "v"), PLACEMENTS)
def test_no_split_of_layers_that_differ_has_a_faster_slowest_rank(pp: int, chunks: int, v: bool) -> None:
    """Against all splits: two kinds of layers, any costs, with and without a head, free and fixed ends."""
    draw, ranks = random.Random(0), [stages_of_rank(rank, pp, chunks, v_shape=v) for rank in range(pp)]
    stages, num_better = pp * chunks, 0
    for number in range(60):
        num_layers = draw.randint(stages, 11)
        kinds = [draw.randint(1, 40), draw.randint(1, 40)]
        costs = [draw.choice(kinds) if number % 2 else draw.randint(1, 40) for _ in range(num_layers)]
        head = draw.choice([0, draw.randint(1, 80)])
        ends: dict[str, int] = {}
        if number % 3 == 0 and stages > 1:
            ends = draw.choice([{"first": 1}, {"last": 1}, {"first": 2}, {"first": 1, "last": 2}])
            if (num_layers - sum(ends.values())) % max(1, stages - len(ends)) or num_layers < stages + 2:
                continue
            if stages == len(ends) and num_layers != sum(ends.values()):
                continue
        split = layers_of_stages(costs, pp, chunks=chunks, v_shape=v, head_cost=head, **ends)
        assert [layer for part in split for layer in part] == list(range(num_layers)) and all(split)
        assert len(split[0]) == ends.get("first", len(split[0])) and len(split[-1]) == ends.get("last", len(split[-1]))
        slowest = max(loads_of(costs, [part.stop for part in split], head, ranks))
        every = every_split(num_layers, stages, ends.get("first"), ends.get("last"))
        assert slowest == min(max(loads_of(costs, one, head, ranks)) for one in every), (costs, head, ends)
        if not ends and num_layers % stages == 0 and len(set(costs)) > 1:
            even = [num_layers // stages * (stage + 1) for stage in range(stages)]
            is_faster = slowest < max(loads_of(costs, even, head, ranks))
            num_better += is_faster
            assert is_faster or [part.stop for part in split] == even
    assert num_better or stages > 5 or pp == 1


def test_large_models_of_two_kinds_of_layers_are_split_near_the_bound() -> None:
    """More splits than anybody can try: the mean of the ranks is within a layer, and the search has an end."""
    costs = [10] + [31, 10, 10] * 31 + [31, 31]
    for pp, chunks, v in ((8, 1, False), (8, 2, False), (8, 4, False), (16, 2, True)):
        split = layers_of_stages(costs, pp, chunks=chunks, v_shape=v, head_cost=14)
        ranks = [stages_of_rank(rank, pp, chunks, v_shape=v) for rank in range(pp)]
        assert max(loads_of(costs, [part.stop for part in split], 14, ranks)) < (sum(costs) + 14) / pp + 31
