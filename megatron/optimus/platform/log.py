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

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the stream is always sys.stdout")


def setup(rank: int, *, verbose: bool = False) -> logging.Logger:
    """Configures the logger and returns it; a second call replaces the first.

    Rank 0 writes ``[time] message`` from INFO on, or from DEBUG on where it is ``verbose``; every other rank ``[time]
    rank <r>: message`` from WARNING on.
    """
    logger = logging.getLogger("optimus")
    logger.setLevel((logging.DEBUG if verbose else logging.INFO) if rank == 0 else logging.WARNING)
    logger.propagate = False  # libraries that configure the root logger would print each line twice
    handler = _StdoutHandler()
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"[%(asctime)s] {prefix}%(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logger.handlers[:] = [handler]
    return logger
