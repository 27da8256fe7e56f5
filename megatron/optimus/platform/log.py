"""The logger "optimus": rank 0 logs at INFO, other ranks log warnings and errors."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from megatron.optimus.platform.exit_codes import USER_ERROR


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun in singular or plural: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """12 -> "0:12", 3723 -> "1:02:03", 200000 -> "2d07h"; days matter more than minutes in long runs."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# Control characters but tab and line feed, directions of writing, separators of lines, and bytes that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Returns the text with every character escaped that a terminal would obey, such as the beginning of a colour.

    Names of files and options, values and tokens are shown through this: whoever made them may be somebody else.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(text))


def print_error(error: object, label: str = "error") -> None:
    """Prints "error: ..." to stderr, as one line."""
    sys.stderr.write(f"{label}: {printable(error)}".replace("\n", "\\n") + "\n")


class Main(Protocol):
    """A command: takes its words, None for those of this process, and returns the exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def prints_errors(*kinds: type[Exception], code: int = USER_ERROR) -> Callable[[Main], Main]:
    """Makes a command print errors of these kinds as one line, and return ``code``, instead of raising them."""

    def mark(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return main(argv)
            except kinds as error:
                print_error(error)
                return code

        return run

    return mark


def _make_printable(record: logging.LogRecord) -> bool:
    """Filters the logger: every handler gets the message without control characters."""
    try:
        text = record.getMessage()
    except Exception:  # wrong arguments: the handler reports them
        return True
    if _UNPRINTABLE.search(text):
        record.msg, record.args = printable(text), None
    return True


logging.getLogger("optimus").addFilter(_make_printable)


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
