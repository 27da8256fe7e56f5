"""How often to do what training stands still for: every N steps, or so that it takes 0.5% of the time (``auto``)."""

from __future__ import annotations

import logging
import math

from megatron.optimus.platform.ranks import Ranks

AUTO = -1  # as an interval
_FIRST_STEPS = 3  # between the first times, whose cost is measured
_SHARE = 0.005  # three that a run may have, with all else that it watches, stay below 2% together

logger = logging.getLogger("optimus")


def is_multiple(step: int, interval: int) -> bool:
    """Whether a step is a multiple of an interval; 0 has none."""
    return interval > 0 and step % interval == 0


class Interval:
    """The steps between two times that something is done, in ``steps``.

    Args:
        interval: it is done in each step that is a multiple; 0: never; AUTO: as often as costs ``_SHARE`` of the time.
        name: for the log.
        ranks: whose largest interval counts.
        longest: steps, with AUTO; 0 for no limit.
    """

    def __init__(self, interval: int, name: str, ranks: Ranks, longest: int = 0) -> None:
        self.is_auto, self.steps = interval == AUTO, _FIRST_STEPS if interval == AUTO else interval
        self._name, self._ranks, self._longest = name, ranks, longest
        self.restart()

    def restart(self) -> None:
        """With AUTO, begins to measure again. Local."""
        self._next: int | None = None  # with AUTO: the step in which it is due; counted from the next ``is_due``
        self._num_chosen, self._cost_s = 0, math.inf

    def is_due(self, step: int) -> bool:
        """Whether it is to be done in a step. Local."""
        if not self.is_auto:
            return is_multiple(step, self.steps)
        if self._next is None:
            self.done(step - 1)
        return step >= (self._next or 0)

    def done(self, step: int) -> None:
        """Notes that it was done in a step. Local."""
        self._next = step + self.steps

    def choose(self, cost_s: float, step_s: float, earliest: int = 0) -> None:
        """With AUTO, chooses the interval from what it has cost now. Collective.

        Args:
            cost_s: seconds that training stood still.
            step_s: seconds of a step without it.
            earliest: the first step in which it can be done; one before that is settled.
        """
        cost_s, self._cost_s = min(cost_s, self._cost_s), cost_s  # one that was interrupted is no measure
        self._num_chosen += 1
        if self._num_chosen < 2 or self._next is None:  # the first time is not usual
            return
        last = self._next - self.steps
        own = max(1, math.ceil(cost_s / (_SHARE * max(step_s, 1e-9))))
        self.steps = -self._ranks.start_all_reduce_min(-own)()
        self.steps = min(self.steps, self._longest or self.steps)
        if self._next >= earliest:
            self._next = max(last + self.steps, earliest)
        if self._num_chosen == 2:
            text = "%s every %d steps: one costs %.4f s, a step takes %.3f s"
            logger.info(text, self._name, self.steps, cost_s, step_s)
