"""The noise scale: a ratio of averages over steps, which a resumed run continues."""

from __future__ import annotations

import math

import pytest

from megatron.optimus.training.engine import NOISE_GROUPS
from megatron.optimus.training.noise_scale import DECAY, FIELD, GradientNoiseScale

WIDTH = 2 * len(NOISE_GROUPS)


def measured(*pairs: tuple[float, float]) -> list[float]:
    """|G|^2 and tr(Sigma) / samples of the first groups; nothing of the others."""
    values = [value for pair in pairs for value in pair]
    return values + [0.0] * (WIDTH - len(values))


def test_it_is_the_ratio_of_the_averages() -> None:
    scale = GradientNoiseScale()
    assert scale.observe(measured((2.0, 3.0)), 8, skipped=False) == {FIELD: pytest.approx(3.0 * 8 / 2.0)}
    # Of a step with other values and another size; the ratio of averages is not the average of ratios.
    found = scale.observe(measured((4.0, 1.0)), 16, skipped=False)
    square, trace = (DECAY * a + b for a, b in ((2.0, 4.0), (3.0 * 8, 1.0 * 16)))
    assert found == {FIELD: pytest.approx(trace / square)}


def test_parts_are_named_where_there_are_several() -> None:
    first, second = NOISE_GROUPS[:2]
    found = GradientNoiseScale().observe(measured((2.0, 3.0), (-1.0, 5.0)), 10, skipped=False)
    assert found == {FIELD: pytest.approx(80.0), f"{FIELD}/{first}": pytest.approx(15.0)}, (
        f"the noise of {second} hides its gradient"
    )


def test_steps_that_do_not_count_change_nothing() -> None:
    scale = GradientNoiseScale()
    assert scale.observe([], 8, skipped=False) == {} and scale.to_json() == {}
    before = scale.observe(measured((2.0, 3.0)), 8, skipped=False)
    assert scale.observe(measured((9.0, 9.0)), 8, skipped=True) == before
    assert scale.observe(measured((math.nan, 9.0)), 8, skipped=False) == before


def test_a_resumed_run_goes_on_and_foreign_values_are_left_out() -> None:
    scale, resumed = GradientNoiseScale(), GradientNoiseScale()
    scale.observe(measured((2.0, 3.0)), 8, skipped=False)
    resumed.restore(scale.to_json())
    more = measured((1.0, 4.0))
    assert resumed.observe(more, 4, skipped=False) == scale.observe(more, 4, skipped=False)
    for foreign in ({}, {FIELD: 3}, {FIELD: [1.0]}, {FIELD: ["x"] * WIDTH}, {FIELD: [math.inf] * WIDTH}):
        fresh = GradientNoiseScale()
        fresh.restore(foreign)
        assert fresh.to_json() == {}
