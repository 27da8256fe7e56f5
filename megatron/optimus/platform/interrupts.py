"""Ctrl-C before a program can answer it: importing torch takes seconds, and an interrupt then is a page of traceback.

A program calls ``end_silently`` first and ``raise_again`` where its own handling begins; one that has nothing to clean
up never calls the latter. SIGINT that is ignored, as in a background job of a shell, stays ignored.
"""

from __future__ import annotations

import signal


def end_silently() -> None:
    """From here on SIGINT ends the process at once, by the signal."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """From here on SIGINT is a KeyboardInterrupt, as usual in Python."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_reader() -> None:
    """From here on a reader of this program's output that has enough, such as ``head``, ends it silently."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
