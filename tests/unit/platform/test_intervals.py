"""The interval at which training stands still for at most a hundredth of the time."""

from __future__ import annotations

import pytest

from megatron.optimus.platform.intervals import affordable_interval


@pytest.mark.parametrize(
    ("cost", "step", "interval"),
    [(0.009, 0.38, 3), (0.01, 1.0, 1), (0.0101, 1.0, 2), (0.0, 1.0, 1), (1.0, 0.0, 10**11)],
)
def test_auto_costs_at_most_a_hundredth(cost: float, step: float, interval: int) -> None:
    assert affordable_interval(cost, step) == interval
    assert cost <= 0.01 * interval * max(step, 1e-9) * (1 + 1e-9)
