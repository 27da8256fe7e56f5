"""Progress of a command on standard error: a live bar on a terminal, a line every ten seconds everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from megatron.optimus.platform.log import duration

if TYPE_CHECKING:
    from rich.progress import Progress as LiveBar

_FIRST_LINE_SECONDS = 1.0  # a command that ends before prints none
_LINE_SECONDS = 10.0


class Progress:
    """Shows how far a command has got, from its first second on. A context manager.

    A thread writes the lines, so that a command that waits (for a tokenizer, for a slow disk) shows that it is alive.
    The bar needs the package rich; without it a terminal gets lines too.

    Args:
        title: what is being done, such as "preprocess"
    """

    def __init__(self, title: str) -> None:
        self._title, self._text = title, ""
        self._fraction: float | None = None
        self._bar: LiveBar | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            self._bar = _live_bar()
            self._task = self._bar.add_task(self._title, total=None, text="starting")
            self._bar.start()
        else:
            threading.Thread(target=self._write_lines, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()

    def update(self, fraction: float | None, text: str) -> None:
        """Sets what is shown; cheap enough to be called for every item.

        Args:
            fraction: of the work that is done, 0 to 1; None: not known
            text: counts, such as "1200 documents"
        """
        self._fraction, self._text = fraction, text
        if self._bar is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, total=total, completed=fraction or 0.0, text=text)

    def line(self) -> str:
        """Describes the state in one line."""
        seconds, fraction = time.monotonic() - self._started, self._fraction
        words = [self._text or "starting", f"{duration(seconds)} elapsed"]
        if fraction:
            left = duration(seconds * (1 / fraction - 1))
            words = [f"{100 * min(1.0, fraction):.1f} %", *words, f"{left} left"]
        return f"{self._title}: {', '.join(words)}"

    def _write_lines(self) -> None:
        wait = _FIRST_LINE_SECONDS
        while not self._ended.wait(wait):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed stderr must not end the command
                sys.stderr.write(f"{self.line()}\n")
                sys.stderr.flush()
            wait = _LINE_SECONDS


class StderrHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is at that moment, so that log lines appear above a live bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        self.stream = sys.stderr
        super().emit(record)


def _live_bar() -> LiveBar:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as LiveBar

    columns = TextColumn("{task.description}"), BarColumn(bar_width=16), TaskProgressColumn(), TimeRemainingColumn()
    return LiveBar(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), transient=True)
