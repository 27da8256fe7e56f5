"""Make one HTML page of a run, or of several beside each other.

    optimus report runs/mula-7b
    optimus report runs/mula-7b runs/mula-7b-wsd --out comparison.html

The page needs no network and no other file. It has loss, validation and tasks against tokens, FLOPs, hours or steps,
speed and memory, where the time went, restarts, the load of experts, samples, checkpoints and the configuration. A run
may be unfinished or of an older version. Of one run the page is RUN/report.html unless --out names another file.

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.config.load import Parser
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.log import print_error, printable, prints_errors
from megatron.optimus.report.page import FILE_NAME, write_report


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus report``; returns the exit code."""
    parser = Parser("report", __doc__ or "", usage="optimus report RUN [RUN ...] [--out FILE]")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help=f"the page; default: {FILE_NAME} in the run's folder, or here")
    options = parser.parse(argv)
    out = options.out or (options.runs[0] / FILE_NAME if len(options.runs) == 1 else Path(FILE_NAME))
    for note in write_report(options.runs, out):
        print_error(note, "note")
    print(printable(out))
    return 0
