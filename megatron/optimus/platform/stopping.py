"""A signal asks a run to end well: the step goes on to its end, is saved, and then all ranks leave together.

Schedulers send SIGTERM before they kill, people press Ctrl-C, terminals are closed. Ranks hear of it at different
moments, so a rank only notes the wish; the reduction that every step makes carries it to all, and they leave after the
same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# One wish arrives several times: from the terminal, from the launcher, from mpiexec. Only a later one means "now".
_ECHO_SECONDS = 1.0


class StopRequest:
    """Listens while it is entered. The first signal sets ``signal``; another one a second later ends the process.

    Outside of the main thread, where Python hands out no signals, it never hears one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between two of its instructions: never, while a rank waits in a collective for a peer
        # that is gone. The descriptor is written to at once, and the thread behind it is free to act.
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # of a job in the background: it stays so
                self._previous[number] = signal.signal(number, lambda *_: None)
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
