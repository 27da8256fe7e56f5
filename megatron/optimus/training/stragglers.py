"""Compares over the ranks how long each is busy with its own work in a step, and names one for which the others wait.

All ranks take the same time for a step, as they wait for the slowest. How they spend it differs: a thread looks a few
hundred times a second where the training thread is, in its own work or in a wait for other ranks or the device. It does
so for a few steps of every ``straggler_check_interval``; other steps cost nothing. Work that the device does behind the
host is not seen here but by the products that health.py times.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from types import FrameType

from megatron.optimus.platform.ranks import Ranks

logger = logging.getLogger("optimus")

STEPS = 5  # that are looked at
_PERIOD_SECONDS = 0.003
_FEWEST_SAMPLES = 10
# By so much, as a share of a step and in time, is a straggler's own work longer than the usual: less may be noise.
_LEAST_SHARE, _LEAST_SECONDS = 0.1, 0.01


@dataclass(frozen=True)
class OwnWork:
    """How a rank spends a step."""

    rank: int
    host: str
    own_seconds: float  # of a step, outside of waits
    step_seconds: float
    where: str  # mostly


class StepSampler:
    """Samples what the thread that constructs it (the training thread) is doing, until ``stop``."""

    def __init__(self) -> None:
        self._thread_id, self._began = threading.get_ident(), time.monotonic()
        self._places: Counter[tuple[str, str, int]] = Counter()  # function, file and line
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="step sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the sampling thread."""
        self._stop.set()
        self._thread.join()

    def report(self, ranks: Ranks, steps: int) -> list[OwnWork]:
        """Ends the sampling; logs and returns the stragglers of the ``steps`` since construction. Collective."""
        seconds = (time.monotonic() - self._began) / steps
        self.stop()
        share = self._places.total() / self._samples if self._samples >= _FEWEST_SAMPLES else -1.0
        where = "".join(f"{name} ({Path(file).name}:{line})" for (name, file, line), _ in self._places.most_common(1))
        own = json.dumps([socket.gethostname(), share * seconds, seconds, where])
        found = [OwnWork(rank, *json.loads(part)) for rank, part in enumerate(ranks.all_gather_bytes(own.encode()))]
        slow, usual = stragglers(found)
        for one in slow if ranks.rank == 0 else ():
            logger.warning(
                "rank %d on %s is a straggler: of a step's %.3g s it spends %.3g s in its own work, a usual rank %.3g "
                "s; mostly at %s",
                *(one.rank, one.host, one.step_seconds, one.own_seconds, usual, one.where),
            )
        return slow

    def _sample(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            frame = sys._current_frames().get(self._thread_id)
            self._samples += 1
            if frame is not None and not _is_waiting(frame):
                self._places[frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno] += 1


def stragglers(found: list[OwnWork]) -> tuple[list[OwnWork], float]:
    """Returns the ranks whose own work is far longer than the usual, longest first, and the usual one in seconds."""
    usual = median_low(one.own_seconds for one in found)
    if usual < 0:  # steps too short to look at
        return [], usual
    slow = [one for one in found if one.own_seconds - usual > max(_LEAST_SHARE * one.step_seconds, _LEAST_SECONDS)]
    return sorted(slow, key=lambda one: -one.own_seconds), usual


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether the thread is in a collective, or waits for one or for the device."""
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file.endswith(("distributed_c10d.py", "platform/device.py")) or (
            name in ("wait", "barrier") and not file.endswith("threading.py")
        ):
            return True
        frame = frame.f_back
    return False
