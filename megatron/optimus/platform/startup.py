"""Times the phases of a start, up to the end of the first step, and logs a phase that takes long."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.optimus.platform import heartbeat

logger = logging.getLogger("optimus")

SILENT_SECONDS = 2.0  # a phase that lasts longer says what it does


class StartupClock:
    """Seconds of each phase of a start on this rank, from the start of the process on.

    Time within a phase counts for that phase alone, also where another encloses it. Time outside of any counts for
    "other", what the process did before the clock was built for ``first``.
    """

    def __init__(self, first: str = "imports") -> None:
        self.seconds: dict[str, float] = {}
        self.is_running = True
        self._phases = ["other"]
        self._line = threading.Timer(0.0, lambda: None)  # of the innermost phase; never started
        self._since = time.monotonic()
        self._add(first, _process_age())

    @contextmanager
    def phase(self, name: str, doing: str = "") -> Iterator[None]:
        """Times the work inside.

        Args:
            name: of the phase; several with one name add up.
            doing: for the log, where the work takes longer than two seconds ("reading the checkpoint").
        """
        self._charge()
        heartbeat.beat(f"start-up: {doing or name}")
        self._phases.append(name)
        self._line.cancel()  # what encloses this phase says less
        self._line = line = threading.Timer(SILENT_SECONDS, logger.info, ("%s ...", doing))
        line.daemon = True
        if doing:
            line.start()
        try:
            yield
        finally:
            line.cancel()
            self._charge()
            self._phases.pop()

    def finish(self, name: str) -> dict[str, float]:
        """Ends the start; the rest of its time counts for ``name``. Returns the seconds of each phase, and "total"."""
        self._phases = [name]
        self._charge()
        self.is_running = False
        return {**self.seconds, "total": sum(self.seconds.values())}

    def _charge(self) -> None:
        now = time.monotonic()
        self._add(self._phases[-1], now - self._since)
        self._since = now

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _process_age() -> float:
    """Seconds since the start of this process; 0 where the system does not say (not Linux)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
