"""SIGINT while a program starts, SIGPIPE in commands that print, and signals that ask a training run to stop.

Importing torch takes seconds, and an interrupt during an import prints a page of traceback. A program therefore calls
``end_on_sigint`` before its imports and ``raise_on_sigint`` where its own handling of KeyboardInterrupt begins. A
SIGINT that is ignored, as in a background job of a shell, stays ignored.

While a run trains, ``StopRequest`` records the first of SIGTERM (sent by schedulers before they kill a job), SIGINT
(Ctrl-C) and SIGHUP (a closed terminal). Ranks receive it at different moments, so it only sets a flag: the reduction
that every step makes anyway carries the flag to all ranks, which then save and leave after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# One request arrives several times: from the terminal, the launcher and mpiexec. Only a later one means "now".
_ECHO_SECONDS = 1.0


def end_on_sigint() -> None:
    """Makes SIGINT end the process at once and without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_sigint() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, Python's default."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_on_sigpipe() -> None:
    """Makes the process end silently when the reader of its output closes the pipe, as ``head`` does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def handle_stop_signals(handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Sets a handler of the stop signals; returns those before. A signal that is ignored stays so.

    That is SIGINT in a job that a shell runs in the background, and SIGHUP under nohup.
    """
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


class StopRequest:
    """Context manager that records the first stop signal in ``signal``; one a second later ends the process.

    Outside of the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between two of its instructions: never, while a rank waits in a collective for a peer
        # that is gone. The descriptor is written to at once, and the thread behind it is free to act.
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = handle_stop_signals(lambda *_: None)
        threading.Thread(target=self._listen, args=(read,), name="stop request", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not hasattr(self, "_write"):
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write)

    def _listen(self, read: int) -> None:
        first = 0.0
        while numbers := os.read(read, 64):  # empty when __exit__ closes the other end
            for number in set(numbers) & set(self._previous):
                if self.signal is None:
                    self.signal, first = signal.Signals(number), time.monotonic()
                elif time.monotonic() - first > _ECHO_SECONDS:
                    os._exit(128 + number)
        os.close(read)
