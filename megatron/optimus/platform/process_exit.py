"""Ends a process with the exit code it chose, without finalizing the Python interpreter.

A thread of gloo may drop the last reference to a failed or pending collective at any time, and with it a tensor that
has a Python object. While the interpreter finalizes, such a thread cannot take the GIL: CPython unwinds it through a
destructor, and the process aborts with SIGABRT in place of its exit code. Torch cannot exclude this by a check of its
own, for the interpreter may begin to finalize right after it (pytorch issue 190489). Programs that join process groups
therefore run their exit handlers and flush their output while the interpreter is whole, and leave by ``os._exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from megatron.optimus.platform import missing_packages

_EXIT_HANDLERS_SECONDS = 60.0
_FLUSH_FAILED = 120  # the interpreter's own exit code for output that could not be written


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Calls ``main`` and ends the process with its exit code; the last line of a program that joins process groups.

    ``sys.exit`` and exceptions mean what they mean to the interpreter: the code or message of the former, a traceback
    and exit code 1 for the latter. A package that is not installed is one line and exit code 2. A KeyboardInterrupt
    that ``main`` leaves open has exit code 130.

    Args:
        main: the program; returns its exit code, None for 0.
    """
    code: int | None = 1
    try:
        try:
            code = main()
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                code = error.code
            else:
                sys.stderr.write(f"{error.code}\n")
        except BaseException as error:
            code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            if (line := missing_packages.explain(error)) is None:
                sys.excepthook(*sys.exc_info())
            else:
                code = 2
                sys.stderr.write(f"{line}\n")
    finally:  # also where stderr cannot be written, or another interrupt comes
        exit_process(code or 0)


def exit_process(code: int) -> NoReturn:
    """Runs the exit handlers, flushes all output and ends the process with ``code``.

    Exit handlers (``atexit``: trackers, logging, the lock of the checkpoint folder, queues of multiprocessing) have 60
    seconds. Threads are not waited for, as those of a failed run may wait for peers that are gone: whoever needs a
    thread's work closes its owner before. Static destructors of C++ libraries do not run.

    Args:
        code: exit code; 0 becomes 120 where stdout or stderr cannot be flushed, as in the interpreter's own exit.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would take the exit code away
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            limit = threading.Timer(_EXIT_HANDLERS_SECONDS, os._exit, (code & 0xFF,))
            limit.daemon = True
            limit.start()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except OSError as error:
                if not code and stream is sys.stdout and error.errno != errno.EPIPE:
                    sys.stderr.write(f"error: standard output cannot be written: {error.strerror}\n")
                code = code or _FLUSH_FAILED
        ctypes.CDLL(None).fflush(None)  # what C libraries have buffered, such as NCCL's log
    finally:
        os._exit(code & 0xFF)
