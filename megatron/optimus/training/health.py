"""Checks that a run is healthy: skips outlying updates, ends a run that stays broken, and finds slow devices.

Outlying updates: step k is compared with the steps up to k - 2. The host reads a step's numbers one step late
(trainer.py), and so a run on a GPU, a run on a CPU and a resumed run decide alike.

Slow devices: in a synchronous run all ranks wait for the slowest, so the time of a step is the same on every rank and
tells nothing. Each device therefore times the same matrix products, alone. That shows what makes nodes slow in
practice (a power cap, a clock lowered by heat, a process left over from another job); it does not show a slow link.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import torch

from megatron.optimus.context import RunContext
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.log import counted

logger = logging.getLogger("optimus")

MAX_SKIPPED_IN_A_ROW = 5
WINDOW = 128  # a step is compared with so many steps before it
_FEWEST = 32  # with fewer steps nothing is an outlier
_LOSS_SIGMA = 6.0  # a loss so many standard deviations above the mean is logged

SLOW = 1.1  # a device is slow from this multiple of the median time on
_MAX_NAMED = 8
_REPETITIONS = 5  # the fastest counts: one interruption says nothing about a device


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


class RecentValues:
    """The last finite values of a number that every step has."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=WINDOW + 2)

    def add(self, step: int, value: float) -> None:
        if math.isfinite(value):
            self._values.append((step, value))

    def limit(self, step: int, sigma: float) -> float:
        """Mean plus ``sigma`` standard deviations of the last WINDOW values up to ``step`` - 2; infinity with few."""
        values = [value for number, value in self._values if number <= step - 2][-WINDOW:]
        if len(values) < _FEWEST:
            return math.inf
        mean = fmean(values)  # statistics.stdev calculates in fractions, which takes ten times as long
        return mean + sigma * math.sqrt(fmean((value - mean) ** 2 for value in values))

    def to_json(self) -> list[list[float]]:
        """[[step, value], ...], for a checkpoint."""
        return [[step, value] for step, value in self._values]

    def restore(self, stored: Any) -> None:
        """Takes what ``to_json`` gave; ignores anything else, which checkpoints of other programs may hold."""
        self._values.clear()
        for pair in stored if isinstance(stored, list) else []:
            if (
                isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(x, int | float) and abs(x) < 1 << 63 for x in pair)
            ):
                self.add(int(pair[0]), float(pair[1]))


class Health:
    """Compares each step of a run with those before it. Every rank sees the same numbers and decides alike."""

    def __init__(self, spike_sigma: float = 0.0) -> None:
        """``spike_sigma``: an update is skipped whose gradient norm is so many standard deviations above the mean; 0
        skips none."""
        self._sigma = spike_sigma
        self._losses = RecentValues()
        self.grad_norms = RecentValues()
        self._skipped: list[float] = []  # gradient norms of the steps skipped in a row

    def largest_norm(self, step: int) -> float:
        """Gradient norm beyond which the update of ``step`` (from 1) is skipped."""
        return self.grad_norms.limit(step, self._sigma) if self._sigma > 0 else math.inf

    def observe(self, step: int, *, loss: float, grad_norm: float, skipped: bool) -> None:
        """Adds a finished step. Raises TrainingError at the MAX_SKIPPED_IN_A_ROW-th skipped step in a row."""
        usual = self._losses.limit(step, _LOSS_SIGMA)
        if loss > usual:
            logger.info(
                "loss spike: %.4f in step %d is more than %g standard deviations above the mean of the last %d steps",
                *(loss, step, _LOSS_SIGMA, WINDOW),
            )
        if skipped and math.isfinite(grad_norm):
            logger.info(
                "step %d is skipped: its gradient norm %.3g is far above those of the steps before", step, grad_norm
            )
        self._losses.add(step, loss)
        self.grad_norms.add(step, grad_norm)
        self._skipped = [*self._skipped, grad_norm] if skipped else []
        if len(self._skipped) >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(_broken(step, self._skipped))


def _broken(step: int, norms: Iterable[float]) -> str:
    norms = list(norms)
    finite = [norm for norm in norms if math.isfinite(norm)]
    what = f"gradient norms were far above the usual ({max(finite):.3g})" if finite else "gradients were not finite"
    return (
        f"{what} in {len(norms)} steps in a row, up to step {step}; the weights are "
        f"those before step {step - len(norms) + 1}. Resume from the last checkpoint with a lower lr, or "
        "look at the data of these steps"
    )


@dataclass(frozen=True)
class DeviceTime:
    """Seconds that one rank's device took for the matrix products."""

    rank: int
    host: str
    seconds: float


def check_devices(run: RunContext) -> list[DeviceTime]:
    """Times every rank's device; logs and returns the slow ones, slowest first. Collective."""
    own = json.dumps([socket.gethostname(), time_products(run.device, run.dtype)])
    found = [json.loads(data) for data in run.ranks.all_gather_bytes(own.encode())]
    timings = [DeviceTime(rank, host, seconds) for rank, (host, seconds) in enumerate(found)]
    slow = slow_devices(timings)
    usual = median_low(timing.seconds for timing in timings)
    logger.info(
        "devices: %s took %.2f ms for the same matrix products in the median; slower than %g times that: %s",
        *(counted(len(timings), "rank"), usual * 1e3, SLOW, describe(slow, usual)),
    )
    return slow


def slow_devices(timings: list[DeviceTime]) -> list[DeviceTime]:
    """The devices that took over SLOW times the median, slowest first."""
    limit = SLOW * median_low(timing.seconds for timing in timings)
    return sorted((t for t in timings if t.seconds > limit), key=lambda timing: -timing.seconds)


def describe(slow: list[DeviceTime], usual: float) -> str:
    """ "rank 7 on node3 (1.38x), ..." """
    named = [f"rank {t.rank} on {t.host} ({t.seconds / usual:.2f}x)" for t in slow[:_MAX_NAMED]]
    more = [f"and {len(slow) - _MAX_NAMED} more"] if len(slow) > _MAX_NAMED else []
    return ", ".join(named + more) or "none"


def time_products(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of ten products of square matrices, the fastest of a few times."""
    size = 256 if device.type == "cpu" else 4096
    a, b = (torch.full((size, size), 1 / size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(1 + _REPETITIONS):  # the first one loads the kernel
        devices.synchronize(device)
        started = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        devices.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
