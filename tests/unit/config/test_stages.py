"""Layers of pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.stages import check_micro_batches, layers_of_stages, stages_of_rank


def sizes(*arguments: int, **options: float) -> list[int]:
    return [len(layers) for layers in layers_of_stages(*arguments, **options)]  # type: ignore[arg-type]


def test_an_equal_split_where_none_is_faster() -> None:
    assert sizes(64, 8, head_cost=1.0) == [8] * 8  # a layer less for the head's stage would be one more elsewhere
    assert sizes(64, 8, head_cost=1.1) == [9, 8, 8, 8, 8, 8, 8, 7]
    assert sizes(16, 2, head_cost=1.5) == [9, 7]


def test_an_uneven_split_spares_the_stage_of_the_head() -> None:
    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(10, 4, head_cost=1.2) == [3, 3, 3, 1]


def test_chunks_are_balanced_over_the_ranks_that_hold_them() -> None:
    """Ranks hold stages (s, s + 4); with the head as 1.5 layers the last one gets 3 of 16, no rank more than 5."""
    split = sizes(16, 4, chunks=2, head_cost=1.5)
    assert [split[rank] + split[rank + 4] for rank in range(4)] == [5, 4, 4, 3]
    assert split[7] == 1
    in_v = sizes(16, 4, chunks=2, v_shape=True, head_cost=1.5)  # the head is on the rank of the first stage
    assert [in_v[rank] + in_v[7 - rank] for rank in range(4)] == [3, 5, 4, 4]
    assert sizes(16, 4, chunks=2) == [2] * 8


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.floats(0, 4), st.booleans())
def test_no_split_has_a_faster_slowest_rank(pp: int, chunks: int, more: int, head: float, v: bool) -> None:
    """Against the bound by counting: whole layers dealt to ranks, at least one a stage."""
    chunks = 2 if v else chunks
    split = sizes(pp * chunks + more, pp, chunks=chunks, v_shape=v, head_cost=head)
    last = next(rank for rank in range(pp) if pp * chunks - 1 in stages_of_rank(rank, pp, chunks, v_shape=v))

    def slowest(with_head: int) -> float:
        others = -(-(pp * chunks + more - with_head) // (pp - 1)) if pp > 1 else 0
        return max(with_head + head, others)

    most = pp * chunks + more - (pp - 1) * chunks
    best = min(slowest(layers) for layers in (range(chunks, most + 1) if pp > 1 else [most]))
    loads = [sum(split[stage] for stage in stages_of_rank(rank, pp, chunks, v_shape=v)) for rank in range(pp)]
    assert max(load + head * (rank == last) for rank, load in enumerate(loads)) == pytest.approx(best)


def test_the_user_may_fix_the_ends() -> None:
    assert sizes(10, 4, first=2, last=2) == [2, 3, 3, 2]
    assert sizes(10, 4, last=1) == [3, 3, 3, 1]


@pytest.mark.parametrize("options", [{"first": 3}, {"first": 10}, {"last": 0}, {"first": 5, "last": 6}])
def test_ends_that_leave_no_equal_rest(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_layers=10 over 4"):
        layers_of_stages(10, 4, **options)


@given(st.integers(1, 12), st.integers(0, 40), st.floats(0, 8))
def test_every_layer_has_one_stage(stages: int, more: int, head: float) -> None:
    split = layers_of_stages(stages + more, stages, head_cost=head)
    assert [layer for part in split for layer in part] == list(range(stages + more))
    assert all(split)


@given(st.integers(1, 8), st.integers(1, 4))
def test_every_stage_has_one_rank(pp: int, chunks: int) -> None:
    loop = sorted(stage for rank in range(pp) for stage in stages_of_rank(rank, pp, chunks, v_shape=False))
    v = sorted(stage for rank in range(pp) for stage in stages_of_rank(rank, pp, 2, v_shape=True))
    assert loop == list(range(pp * chunks))
    assert v == list(range(2 * pp))


def test_micro_batches_in_rounds() -> None:
    for good in (1, 3, 4, 7, 8, 16):
        check_micro_batches(good, 4)
    with pytest.raises(ConfigError, match="9 micro-batches"):
        check_micro_batches(9, 4)
