"""A worker thread for what writes to services (trackers, alerts), which must never delay a run or end it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from megatron.optimus.platform.log import first_line

logger = logging.getLogger("optimus")

_MOST_WAITING = 10_000  # steps of a service that is out of reach; a step holds a few kilobytes


class Background:
    """A thread that runs the functions it is given in their order. It logs their first error and drops later ones."""

    def __init__(self, name: str, most_waiting: int = _MOST_WAITING) -> None:
        """Starts the thread.

        Args:
            name: of the service, for log lines.
            most_waiting: functions that may wait; further ones are dropped, with one warning.
        """
        self._name = name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._has_failed = self._is_full = False
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queues a function, without waiting for it."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            if not self._is_full:
                logger.warning(
                    "%s does not keep up: more than %d items wait, further ones are dropped",
                    self._name,
                    self._queue.maxsize,
                )
            self._is_full = True

    def close(self, seconds: float) -> bool:
        """Waits at most ``seconds`` until every queued function has run. Returns whether all have."""
        try:
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("%s has not ended within %g s: the rest of its work is lost", self._name, seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # of a service, whatever it is
                if not self._has_failed:
                    logger.error("%s: %s; training goes on", self._name, first_line(error))
                self._has_failed = True
