"""Ends a command with one line where its standard output is closed (``>&-``) or full (``>/dev/full``).

Python itself drops what is printed to a closed standard output, and reports a full disk by a traceback, or in silence
when its buffer is flushed too late.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn


class _CheckedOutput:
    """Standard output, whose errors end the program with one line.

    They are no ``OSError``: a command that catches one means its files, and argparse drops those of its help.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text."""
        if self._stream is None:
            _give_up(os.strerror(errno.EBADF))
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _end_by_sigpipe()
        except OSError as error:
            _give_up(error.strerror)

    def flush(self) -> None:
        """Writes what is buffered."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except BrokenPipeError:
            _end_by_sigpipe()
        except OSError as error:
            _give_up(error.strerror)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _end_by_sigpipe() -> NoReturn:
    """Ends as commands whose reader has enough (``| head``) do. Those with connections ignore the signal until then."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise SystemExit(128 + signal.SIGPIPE)  # where the signal is blocked


def _give_up(reason: str | None) -> NoReturn:
    raise SystemExit(f"error: standard output cannot be written: {reason or 'unknown error'}")


@contextlib.contextmanager
def checked_output(*, is_needed: bool = True) -> Iterator[None]:
    """Lets errors of standard output end the program with exit code 1 and one line, for as long as the block lasts.

    A closed descriptor is opened on /dev/null first: the next file that a program opens would get its number, and what
    libraries print would land in that file.

    Args:
        is_needed: False for a program whose work matters more than what it prints: it goes on without a closed output

    Raises:
        SystemExit: what was printed in the block could not be written.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    if not is_needed:
        if sys.stdout is None:
            sys.stderr.write("warning: standard output is closed; what would be printed there is lost\n")
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        yield
        return
    before = sys.stdout
    sys.stdout = checked = _CheckedOutput(before)  # type: ignore[assignment]
    try:
        try:
            yield
        except SystemExit as error:
            if error.code:
                raise
            checked.flush()  # after --help
            raise
        checked.flush()
    finally:
        sys.stdout = before
