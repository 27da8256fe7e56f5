"""Layers of pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.stages import check_micro_batches, layers_of_stages, stages_of_rank


def sizes(*arguments: int, **options: float) -> list[int]:
    return [len(layers) for layers in layers_of_stages(*arguments, **options)]  # type: ignore[arg-type]


def test_equal_split_where_there_is_one() -> None:
    assert sizes(64, 8, head_cost=3.0) == [8] * 8


def test_an_uneven_split_spares_the_stage_of_the_head() -> None:
    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(10, 4, head_cost=1.2) == [3, 3, 3, 1]


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
