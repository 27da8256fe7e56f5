"""Watch a run in the terminal: loss, speed, experts, time left, and whether it goes on.

    optimus watch runs/mula-7b
    optimus watch runs/mula-7b --log job.o1234
    optimus watch runs/mula-7b --once

Reads the files in the run's folder alone, so the run may be on another host. Control-C ends the view, not the run.

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.report.watch import watch


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus watch``; returns the exit code."""
    parser = Parser("watch", __doc__ or "", usage="optimus watch RUN [options]")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--log", type=Path, help="the run's output, for its warnings; default: newest log in RUN")
    parser.add_argument("--interval", type=whole_number(), default=2, help="seconds between looks at the files")
    parser.add_argument("--once", action="store_true", help="show one picture and end, as without a terminal")
    options = parser.parse(argv)
    if options.log is not None and not options.log.is_file():
        raise ConfigError(f"--log {options.log}: no such file")
    with contextlib.suppress(KeyboardInterrupt):
        watch(options.run, options.log, options.interval, once=options.once)
    return 0
