"""How long steps take, by the clock of the device, which does them while the host is further on.

A step takes from the end of the one before to its own end; so all steps and what is left out between them add up to the
run. The host's clock would tell neither: it reads a step when it comes to it, and what it does between two steps may
cost the device nothing. Hence marks in the device's queue, for which the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from megatron.optimus.platform import device as devices

_Spans = list[tuple[devices.DeviceEvent, devices.DeviceEvent]]


@dataclass
class StepTime:
    """One step; its figures, in seconds, wait for its end."""

    begin: devices.DeviceEvent
    end: devices.DeviceEvent | None = None  # None while it is queued
    pauses: _Spans = field(default_factory=list)
    single: _Spans = field(default_factory=list)  # pauses that do not come again
    data: _Spans = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Without pauses."""
        assert self.end is not None
        return self.end.seconds_since(self.begin) - _total(self.pauses) - _total(self.single)

    @property
    def pause(self) -> float:
        """Of pauses before the step, but single ones."""
        return _total(self.pauses)

    @property
    def data_wait(self) -> float:
        """In which the device had nothing to do because data were not there."""
        return _total(self.data)


def _total(spans: _Spans) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans)


class StepClock:
    """The times of a run's steps on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """A step begins here."""
        self._step = StepTime(devices.DeviceEvent(self._device))

    def pause(self, *, is_single: bool = False) -> AbstractContextManager[None]:
        """What is done inside is no part of a step: from where the device is done with what was queued before, until it
        is done with this too. Between steps."""
        return self._span(self._step.single if is_single else self._step.pauses)

    def data(self) -> AbstractContextManager[None]:
        """Inside the host waits for data. While the device still works that costs nothing."""
        return self._span(self._step.data)

    @contextmanager
    def _span(self, spans: _Spans) -> Iterator[None]:
        begin = devices.DeviceEvent(self._device)
        yield
        spans.append((begin, devices.DeviceEvent(self._device)))

    def end_step(self) -> StepTime:
        """Call when a step has been queued; what follows belongs to the next one."""
        step = self._step
        step.end = devices.DeviceEvent(self._device)
        self._step = StepTime(step.end)
        return step
