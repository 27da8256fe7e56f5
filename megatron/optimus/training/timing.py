"""How long steps take, and how many floating-point operations they are.

Times are those of the device, which runs behind the host. A step lasts from the end of the step before to its own end,
without pauses (evaluation, checkpoints), so steps and pauses add up to the run. The host's clock cannot measure that:
what the host does between two steps may cost the device nothing. Hence the clock puts marks into the device's queue,
for which the host never waits.
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
    """The times of one step in seconds; reading them waits until the device has done the step."""

    begin: devices.DeviceEvent
    end: devices.DeviceEvent | None = None  # None while it is queued
    pauses: _Spans = field(default_factory=list)
    one_off_pauses: _Spans = field(default_factory=list)  # pauses that do not recur, as for the profiler
    data: _Spans = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The step without pauses."""
        assert self.end is not None
        return self.end.seconds_since(self.begin) - _total(self.pauses) - _total(self.one_off_pauses)

    @property
    def work_seconds(self) -> float:
        """As ``seconds``; on the CPU without waits for other ranks (``DeviceEvent.work_seconds_since``)."""
        assert self.end is not None
        pauses = [*self.pauses, *self.one_off_pauses]
        return self.end.work_seconds_since(self.begin) - sum(end.work_seconds_since(begin) for begin, end in pauses)

    @property
    def pause(self) -> float:
        """Recurring pauses before the step."""
        return _total(self.pauses)

    @property
    def data_wait(self) -> float:
        """Time in which the device was idle because the next batches had not been read."""
        return _total(self.data)


def _total(spans: _Spans) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans)


class StepClock:
    """Times the steps of a run on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Starts the time of a step."""
        self._step = StepTime(devices.DeviceEvent(self._device))

    def pause(self, *, recurs: bool = True) -> AbstractContextManager[None]:
        """Counts the time inside as a pause between steps, not as part of a step.

        A pause begins when the device has done what was queued before, and ends when it has done the work inside too.

        Args:
            recurs: False leaves it out of the pauses that a step reports, from which the time left is estimated.
        """
        return self._span(self._step.pauses if recurs else self._step.one_off_pauses)

    def data(self) -> AbstractContextManager[None]:
        """Counts the time inside as waiting for data, as far as the device has no work left."""
        return self._span(self._step.data)

    @contextmanager
    def _span(self, spans: _Spans) -> Iterator[None]:
        begin = devices.DeviceEvent(self._device)
        yield
        spans.append((begin, devices.DeviceEvent(self._device)))

    def end_step(self) -> StepTime:
        """Ends the step that has just been queued, and begins the next."""
        step = self._step
        step.end = devices.DeviceEvent(self._device)
        self._step = StepTime(step.end)
        return step


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: counted FLOP/s over the device's dense peak (arXiv 2204.02311, appendix B).

    None where the peak is unknown (``platform.device.peak_flops``).
    """
    return None if peak_flops is None else tokens_per_second_per_device * flops_per_token / peak_flops
