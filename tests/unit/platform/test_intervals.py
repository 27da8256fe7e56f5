"""The interval at which training stands still for at most a two-hundredth of the time."""

from __future__ import annotations

import pytest

from megatron.optimus.platform.intervals import AUTO, Interval
from megatron.optimus.platform.ranks import Ranks


@pytest.mark.parametrize(
    ("cost", "step", "steps"),
    [(0.009, 0.38, 5), (0.005, 1.0, 1), (0.00501, 1.0, 2), (0.0, 1.0, 1), (1.0, 0.0, 2 * 10**11)],
)
def test_auto_costs_at_most_a_two_hundredth(cost: float, step: float, steps: int) -> None:
    interval = Interval(AUTO, "copies", Ranks.alone())
    assert not interval.is_due(1)
    for _ in range(2):
        interval.choose(cost, step)
    assert interval.steps == steps and cost <= 0.005 * steps * max(step, 1e-9) * (1 + 1e-9)


def test_auto_follows_the_cost() -> None:
    """The first time is not usual, one outlier does not count, and a step that is settled stays; a restart keeps it."""
    interval, done = Interval(AUTO, "copies", Ranks.alone(), longest=30), []
    for step in range(5, 100):
        if interval.is_due(step):
            interval.done(step)
            done.append(step)
            cost = {7: 9.0, 10: 0.1, 30: 0.05}.get(step, 1.0)
            interval.choose(cost, 1.0, earliest=step + 2)
    assert done == [7, 10, 30, 40, 50, 80]  # every 3 steps, 20, 10, 10 again, and no more than 30
    interval.restart()
    assert next(step for step in range(50, 90) if interval.is_due(step)) == 79
    fixed = Interval(4, "copies", Ranks.alone())
    assert [step for step in range(10) if fixed.is_due(step)] == [0, 4, 8]
    assert not any(Interval(0, "copies", Ranks.alone()).is_due(step) for step in range(3))
