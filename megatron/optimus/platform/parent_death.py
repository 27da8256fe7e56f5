"""Ends a process when the one that started it dies, however that happens (Linux; elsewhere nothing is done)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


def signal_setter(number: int, parent: int | None = None) -> Callable[[], None] | None:
    """Returns a function for a new process, as ``preexec_fn`` of subprocess: it gets a signal when its parent dies.

    Args:
        number: the signal.
        parent: process number of the parent; default: this process.
    """
    prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)
    parent = parent or os.getpid()

    def set_signal() -> None:  # a C call or two: no lock that another thread may hold at the fork
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the call
            os._exit(128 + number)

    return None if prctl is None else set_signal
