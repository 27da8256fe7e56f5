"""Which devices are slower than the others at the same work: in a synchronous run all wait for the slowest.

A step's own time does not tell, as it is the same on every rank. So each device multiplies the same matrices, alone.
What makes nodes slow in practice (a power cap, a clock held down by heat, a process left over from another job) shows
there; a slow link does not.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import dataclass
from statistics import median_low

import torch

from megatron.optimus.context import RunContext
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.log import counted

logger = logging.getLogger("optimus")

SLOW = 1.1  # times the median
_MAX_NAMED = 8
_REPETITIONS = 5  # the fastest counts: one interruption says nothing about a device


@dataclass(frozen=True)
class Timing:
    """What one rank's device took, in seconds."""

    rank: int
    host: str
    seconds: float


def check_devices(run: RunContext) -> list[Timing]:
    """Times every rank's device and tells of the slow ones, slowest first, which are returned. Collective."""
    own = json.dumps([socket.gethostname(), time_products(run.device, run.dtype)])
    found = [json.loads(data) for data in run.ranks.all_gather_bytes(own.encode())]
    timings = [Timing(rank, host, seconds) for rank, (host, seconds) in enumerate(found)]
    slow = slow_ones(timings)
    usual = median_low(timing.seconds for timing in timings)
    logger.info(
        "devices: %s took %.2f ms for the same matrix products in the median; slower than %g times that: %s",
        *(counted(len(timings), "rank"), usual * 1e3, SLOW, describe(slow, usual)),
    )
    return slow


def slow_ones(timings: list[Timing]) -> list[Timing]:
    """Those beyond SLOW times the median, slowest first."""
    limit = SLOW * median_low(timing.seconds for timing in timings)
    return sorted((t for t in timings if t.seconds > limit), key=lambda timing: -timing.seconds)


def describe(slow: list[Timing], usual: float) -> str:
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
