"""How long steps take, by the clock of the device, which does them while the host is further on.

A step takes from the end of the one before to its own end; so all steps and what is left out between them add up to the
run. The host's clock would tell neither: it reads a step when it comes to it, and what it does between two steps may
cost the device nothing. Hence marks in the device's queue, for which the host never waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.optimus.runtime import device as devices


@dataclass
class StepTime:
    """One step; its figures wait for the end of it."""

    begin: devices.Mark
    end: devices.Mark | None = None  # None while it is queued
    pauses: list[tuple[devices.Mark, devices.Mark, bool]] = field(default_factory=list)  # and whether they recur
    data: tuple[float, devices.Mark] | None = None  # how long the host waited for them, and where they were there

    @property
    def seconds(self) -> float:
        """Without pauses."""
        assert self.end is not None
        return self.end.seconds_since(self.begin) - self._paused()

    @property
    def pause(self) -> float:
        """Seconds of those pauses before the step that recur."""
        return sum(end.seconds_since(begin) for begin, end, recurs in self.pauses if recurs)

    @property
    def data_wait(self) -> float:
        """Seconds that the device had nothing to do because a batch was not there: while it was at the step before,
        or at anything else, the host's waiting cost nothing."""
        if self.data is None:
            return 0.0
        waited, mark = self.data
        return max(0.0, min(waited, mark.seconds_since(self.begin) - self._paused()))

    def _paused(self) -> float:
        return sum(end.seconds_since(begin) for begin, end, _ in self.pauses)


class StepClock:
    """The times of a run's steps on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """A step begins here."""
        self._step = StepTime(devices.Mark(self._device))

    @contextmanager
    def pause(self, *, recurs: bool = True) -> Iterator[None]:
        """What is done inside is no part of a step: from where the device is done with what was queued before, until it
        is done with this too. Between steps, before the next one's data."""
        begin = devices.Mark(self._device)
        yield
        self._step.pauses.append((begin, devices.Mark(self._device), recurs))

    @contextmanager
    def data(self) -> Iterator[None]:
        """Inside the host waits for the data of the step."""
        began = time.perf_counter()
        yield
        self._step.data = time.perf_counter() - began, devices.Mark(self._device)

    def end_step(self) -> StepTime:
        """Call when a step has been queued; what follows belongs to the next one."""
        step = self._step
        step.end = devices.Mark(self._device)
        self._step = StepTime(step.end)
        return step
