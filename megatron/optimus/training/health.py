"""Checks that a run is healthy: names outlying values, skips updates, ends a broken run, and finds slow devices.

Outlying values: each step is compared with the last ones by medians, which a few outliers do not move (``Outliers``).
It costs the device nothing: the numbers are those that are logged.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

import torch

from megatron.optimus.context import RunContext
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.log import counted
from megatron.optimus.training.alerts import NO_ALERTS, NOT_FINITE, UNHEALTHY, Alerts

logger = logging.getLogger("optimus")

MAX_SKIPPED_IN_A_ROW = 5
MAX_SKIPPED_BY_POLICY = 100  # with on_nan=skip
WINDOW = 128  # a step is compared with so many steps before it
_FEWEST = 32  # with fewer steps nothing is an outlier

# A value is far out where it is beyond the usual by so many spreads, and by this much at least: a loss in nats, a
# gradient norm or a z-loss as a factor. A batch of noise costs nats; both norms vary by a few times on healthy runs.
_SPREADS = 8.0
_LEAST = {"loss": 0.3, "grad_norm": 10.0, "z_loss": 10.0}
_RECENT = 32  # values that say what is usual
_FEWEST_USUAL = 12
_MOST_LINES = 5  # of one kind in a run; further ones are counted

SLOW = 1.1  # a device is slow from this multiple of the median time on
_MAX_NAMED = 8
_REPETITIONS = 5  # the fastest counts: one interruption says nothing about a device


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to do."""


class NumericError(TrainingError):
    """Gradients were not finite, or far too large, in several steps in a row."""

    remedy = (
        "resume from the last checkpoint with a lower lr, look at the data of these steps, or have a run skip them by "
        "itself with --on-nan rollback"
    )

    def __init__(self, text: str, first_step: int = 0) -> None:
        """``first_step``: of those in a row."""
        super().__init__(text)
        self.first_step = first_step


class IntegrityError(TrainingError):
    """Bits have flipped, or a computation came out wrong.

    Args:
        text: what was found, and where.
        last_good_step: checkpoints of later steps may contain it.
    """

    def __init__(self, text: str, last_good_step: int) -> None:
        super().__init__(text)
        self.last_good_step = last_good_step


class RecentValues:
    """The last finite values of a number that every step has."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=WINDOW + 2)

    def add(self, step: int, value: float) -> None:
        """Keeps the value of a step, unless it is NaN or infinite."""
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


class Outlier(NamedTuple):
    """A value that is far above the last ones of its kind, and what these were."""

    value: float
    usual: float  # their median
    spread: float  # a standard deviation, estimated robustly; of the logarithm where values are compared by factors


class Outliers:
    """Finds values that are far above the recent values of the same metric.

    The usual value is the median of the last _RECENT, and the spread is estimated from the differences of neighbours: a
    loss that falls steadily or a norm during warm-up has small ones, though its values differ much.

    Args:
        least: what is nearer to the usual is never far out; a factor with ``is_factor``, else a difference.
        is_factor: whether values are compared by their logarithms; values must then be positive.
    """

    def __init__(self, least: float, *, is_factor: bool) -> None:
        self._is_factor, self._least = is_factor, math.log(least) if is_factor else least
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def check(self, value: float) -> Outlier | None:
        """Adds a value. Returns it with the usual value and spread if it is an outlier, else None."""
        if not math.isfinite(value) or (self._is_factor and value <= 0):
            return None
        scaled = math.log(value) if self._is_factor else value
        recent = list(self._recent)
        self._recent.append(scaled)
        if len(recent) < _FEWEST_USUAL:
            return None
        usual = median(recent)
        steps = median(abs(b - a) for a, b in pairwise(recent))
        spread = 1.4826 / math.sqrt(2) * steps  # the standard deviation of values, were they normal
        if scaled <= usual + max(_SPREADS * spread, self._least):
            return None
        return Outlier(value, math.exp(usual) if self._is_factor else usual, spread)

    def to_json(self) -> list[float]:
        """The last values as they are compared, for a checkpoint."""
        return list(self._recent)

    def restore(self, stored: Any) -> None:
        """Takes what ``to_json`` gave; ignores anything else."""
        values = stored if isinstance(stored, list) else []
        if all(isinstance(value, int | float) and abs(value) < 1 << 63 for value in values):
            self._recent = deque(values, maxlen=_RECENT)


class Health:
    """Compares each step of a run with those before it. Every rank sees the same numbers and decides alike."""

    def __init__(
        self,
        spike_sigma: float = 0.0,
        *,
        max_skipped: int = MAX_SKIPPED_IN_A_ROW,
        speaks: bool = True,
        alerts: Alerts = NO_ALERTS,
    ) -> None:
        """``spike_sigma``: an update is skipped whose gradient norm is so many standard deviations above the mean; 0
        skips none. ``max_skipped``: in a row, that end the run. ``speaks``: whether this rank logs what it finds.
        ``alerts``: sends what is logged."""
        self._sigma, self._max_skipped, self._speaks, self._alerts = spike_sigma, max_skipped, speaks, alerts
        self.loss_spike: Outlier | None = None  # of the step last observed
        self._outliers = {name: Outliers(least, is_factor=name != "loss") for name, least in _LEAST.items()}
        self._found: dict[str, _Found] = {}  # by what was out of line
        self._since_save: dict[str, _Found] = {}
        self.grad_norms = RecentValues()
        self._skipped: list[float] = []  # gradient norms of the steps skipped in a row

    def to_json(self) -> dict[str, Any]:
        """What a full checkpoint keeps, so that a resumed run judges as the unbroken one."""
        recent = {name: outliers.to_json() for name, outliers in self._outliers.items()}
        return {"recent_grad_norms": self.grad_norms.to_json(), "recent_values": recent}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Takes what ``to_json`` gave from a checkpoint's metadata, where it is there. No step counts as skipped."""
        self._skipped, self._since_save, self.loss_spike = [], {}, None
        self.grad_norms.restore(kept.get("recent_grad_norms"))
        recent = kept.get("recent_values")
        for name, outliers in self._outliers.items():
            outliers.restore(recent.get(name) if isinstance(recent, dict) else None)

    @property
    def is_not_finite(self) -> bool:
        """Whether the update of the step last observed was left out because its gradients were not finite."""
        return bool(self._skipped) and not math.isfinite(self._skipped[-1])

    def largest_norm(self, step: int) -> float:
        """Gradient norm beyond which the update of ``step`` (from 1) is skipped."""
        return self.grad_norms.limit(step, self._sigma) if self._sigma > 0 else math.inf

    def observe(
        self, step: int, *, loss: float, grad_norm: float, skipped: bool, others: Mapping[str, float] | None = None
    ) -> None:
        """Adds a finished step. ``others``: further numbers of it, by name.

        Raises NumericError at the last skipped step in a row that is allowed.
        """
        self.loss_spike = None
        for name, value in {"loss": loss, "grad_norm": grad_norm, **(others or {})}.items():
            is_left_out = name == "grad_norm" and skipped  # it has changed nothing, and the optimizer says so
            if not math.isfinite(value):
                self._note(NOT_FINITE, step, f"{name} not finite", f"it is {value}", is_left_out=is_left_out)
            elif name in self._outliers and (outlier := self._outliers[name].check(value)) is not None:
                text = f"{value:.4g} after {outlier.usual:.4g} in the steps before"
                self.loss_spike = outlier if name == "loss" else self.loss_spike
                self._note(f"{name}_spike", step, f"{name} far above the usual", text, is_left_out=is_left_out)
        if skipped and math.isfinite(grad_norm):
            logger.info(
                "step %d is skipped: its gradient norm %.3g is far above those of the steps before", step, grad_norm
            )
        self.grad_norms.add(step, grad_norm)
        self._skipped = [*self._skipped, grad_norm] if skipped else []
        if len(self._skipped) >= self._max_skipped:
            self._alerts.send(UNHEALTHY, step, _broken(step, self._skipped), is_logged=True)
            raise NumericError(_broken(step, self._skipped), first_step=step - len(self._skipped) + 1)

    def _note(self, kind: str, step: int, what: str, text: str, *, is_left_out: bool) -> None:
        """Counts a value that is out of line. The first of steps in a row is logged, _MOST_LINES times at most."""
        found = self._found.setdefault(what, _Found(step))
        is_first = found.add(step)
        if self._speaks and is_first and not is_left_out and found.num_rows <= _MOST_LINES:
            logger.warning("step %d: %s: %s", step, what, text)
        if is_first and not is_left_out:
            self._alerts.send(kind, step, f"{what}: {text}", is_logged=True)
        if not is_left_out:
            self._since_save.setdefault(what, _Found(step)).add(step)

    def summary(self) -> list[str]:
        """Returns a line for each kind of value that was out of line in this run."""
        return [f"{what} {found}" for what, found in self._found.items()]

    def marks(self, *, is_saved: bool) -> list[str]:
        """Returns what was out of line since the last full checkpoint; ``is_saved``: the next one is saved now."""
        lines = [f"{what} {found}" for what, found in self._since_save.items()]
        if is_saved:
            self._since_save = {}
        return lines


@dataclass
class _Found:
    """The steps in which something was out of line."""

    first: int
    last: int = -1
    count: int = 0
    num_rows: int = 0  # rows of consecutive steps

    def add(self, step: int) -> bool:
        """Counts a step. Returns whether a row begins."""
        begins = self.count == 0 or step > self.last + 1
        self.last, self.count, self.num_rows = step, self.count + 1, self.num_rows + begins
        return begins

    def __str__(self) -> str:
        if self.count == 1:
            return f"in step {self.first}"
        return f"in {self.count} steps, from step {self.first} to step {self.last}"


def _broken(step: int, norms: Iterable[float]) -> str:
    norms = list(norms)
    finite = [norm for norm in norms if math.isfinite(norm)]
    what = f"gradient norms were far above the usual ({max(finite):.3g})" if finite else "gradients were not finite"
    return (
        f"{what} in {len(norms)} steps in a row, up to step {step}; the weights are "
        f"those before step {step - len(norms) + 1}"
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
