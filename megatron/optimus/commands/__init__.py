"""The subcommands of ``optimus``, one module each; pretrain.py and launch.py are beside this folder.

A module's docstring is the text of ``--help``; ``main(argv)`` returns the exit code: 0, or 2 after a line that begins
with "error:", unless the docstring says otherwise. A new subcommand is a module like train_tokenizer.py and a line in
the table ``COMMANDS`` of cli.py. It parses with ``Parser`` of config/load.py, whose mistakes are ConfigErrors, and
``prints_errors`` names the errors that are the user's: every other one is a traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.optimus.platform.exit_codes import USER_ERROR
from megatron.optimus.platform.log import print_error


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
