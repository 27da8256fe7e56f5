"""The logger "optimus": rank 0 logs at INFO, other ranks log warnings and errors."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun in singular or plural: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


class _StdoutHandler(logging.StreamHandler):
    """Writes to whatever sys.stdout is at that moment, so that a live progress line can redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Says once that lines are lost, as on a full disk, instead of printing a traceback for each."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and sys.stderr is not None:
            if not self._has_failed:
                sys.stderr.write(f"error: the log cannot be written to standard output: {error.strerror}\n")
            self._has_failed = True
        else:
            super().handleError(record)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the stream is always sys.stdout")


def setup(rank: int) -> logging.Logger:
    """Configures the logger and returns it; a second call replaces the first.

    Rank 0 writes ``[time] message`` from INFO on, every other rank ``[time] rank <r>: message`` from WARNING on.
    """
    logger = logging.getLogger("optimus")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # libraries that configure the root logger would print each line twice
    handler = _StdoutHandler()
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"[%(asctime)s] {prefix}%(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logger.handlers[:] = [handler]
    return logger
