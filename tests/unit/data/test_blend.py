"""The blend's order: each corpus within one sample of its share at every position, from any starting point."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.blend import UNIT, BlendSchedule

WEIGHTS = st.lists(st.floats(1e-3, 1), min_size=1, max_size=9)


def check_block(weights: list[float], block: int) -> None:
    """Every prefix that ends in the block has |count - share| < 1, and the ranks count up."""
    schedule = BlendSchedule(weights)
    start, length = block * schedule.block_length, schedule.block_length
    state = schedule.counts(start)
    assert sum(state) == start
    corpora, drawn = BlendSchedule(weights).at(start, length)  # nothing remembered
    for i, numerator in enumerate(schedule.numerators):
        mine = corpora == i
        assert drawn[mine].tolist() == list(range(state[i], state[i] + int(mine.sum())))
        whole, rest = divmod(start * numerator, UNIT)
        deviation = (state[i] - whole) + np.cumsum(mine) - (rest + np.arange(1, length + 1) * numerator) / UNIT
        assert abs(deviation).max() < 1
    ends = schedule.counts(start + length)
    assert ends == [a + int((corpora == i).sum()) for i, a in enumerate(state)]


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, block=st.one_of(st.integers(0, 3), st.integers(0, 10**8)))
def test_within_one_sample_everywhere(weights: list[float], block: int) -> None:
    check_block(weights, block)


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [1] * 13, [0.6, 0.25, 0.15], [0.95, 0.025, 0.01, 0.01, 0.004, 0.001], [3, 0, 2], [1e-4, 1, 1, 1]],
)
def test_within_one_sample_for_shapes_that_are_hard(weights: list[float]) -> None:
    for block in (0, 1, 2, 12345):
        check_block(weights, block)


def test_thousands_of_corpora() -> None:
    weights = np.random.default_rng(0).pareto(1.5, 2419) + 0.2
    check_block(weights.tolist(), 7)


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 20_000), counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4))
def test_any_range_equals_the_whole(weights: list[float], start: int, counts: list[int]) -> None:
    whole = BlendSchedule(weights).at(start, sum(counts))
    schedule, parts = BlendSchedule(weights), []
    for count in counts:
        parts.append(schedule.at(start, count))
        start += count
    for i in range(2):
        assert np.concatenate([part[i] for part in parts]).tolist() == whole[i].tolist()


def test_order_is_pinned() -> None:
    """A change of these numbers changes what every blended run reads after its resume."""
    corpora, drawn = BlendSchedule([5, 3, 2]).at(0, 10)
    assert corpora.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2] and drawn.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1]
    assert BlendSchedule([0.7, 0.2, 0.1]).at(10**12, 10)[0].tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 0, 1]


def test_only_ratios_matter_and_shares_are_exact() -> None:
    a, b = BlendSchedule([0.5, 0.25, 0.25]), BlendSchedule([Fraction(2), 1, 1])
    assert a.numerators == b.numerators and sum(a.numerators) == UNIT
    assert a.shares() == [0.5, 0.25, 0.25]
    assert a.counts(4_000_000_000) == [2_000_000_000, 1_000_000_000, 1_000_000_000]


def test_a_jump_costs_no_more_than_the_start() -> None:
    started = time.perf_counter()
    BlendSchedule([0.7, 0.2, 0.1]).at(10**15, 100)
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(
    "weights", [[], [0], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, 1e-9], [1e-13, 1]]
)
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        BlendSchedule(weights)
