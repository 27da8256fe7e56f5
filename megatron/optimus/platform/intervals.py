"""How often to do what training stands still for, so that it takes a hundredth of the steps' time (option ``auto``)."""

from __future__ import annotations

import math

from megatron.optimus.platform.ranks import Ranks

AUTO = -1  # as an interval
FIRST_STEPS = 3  # between the first times, whose cost is measured
_SHARE = 0.01


def affordable_interval(cost_s: float, step_s: float) -> int:
    """The fewest steps between two times for which they cost at most a hundredth of the steps' time.

    Args:
        cost_s: seconds that training stands still each time.
        step_s: seconds of a step without it.
    """
    return max(1, math.ceil(cost_s / (_SHARE * max(step_s, 1e-9))))


def agreed_interval(cost_s: float, step_s: float, ranks: Ranks) -> int:
    """The largest ``affordable_interval`` of all ranks. Collective."""
    return -ranks.start_all_reduce_min(-affordable_interval(cost_s, step_s))()
