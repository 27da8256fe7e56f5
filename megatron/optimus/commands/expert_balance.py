"""Report how evenly a run's experts load their ranks, and compute a placement that balances them.

    optimus expert-balance runs/mula-7b
    optimus expert-balance runs/mula-7b --ranks 16 --out balance.json --write-placement placement.json

Reads <run>/expert_load.json, which a run writes at each evaluation and at its end. The load is the sum over all steps
since the run was last started, or of its last step with --last-step. Give the placement file to
--moe-expert-placement-file at the next start.

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.placement import to_json
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.training.expert_load import FILE_NAME, LOADS, BalanceReport, report


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus expert-balance``; returns the exit code."""
    parser = Parser("expert-balance", __doc__ or "", usage="optimus expert-balance RUN [options]")
    parser.add_argument("run", type=Path, help=f"a run's folder, or its {FILE_NAME}")
    parser.add_argument("--ranks", type=whole_number(), help="expert parallel size to balance for; default: the run's")
    parser.add_argument("--last-step", action="store_true", help="use the load of the last step, not of all")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--write-placement", type=Path, help="write the balanced placement")
    args = parser.parse(argv)
    path = args.run / FILE_NAME if args.run.is_dir() else args.run
    found = report(path, args.ranks, last_step_only=args.last_step)
    if args.out is not None:
        with naming_write_errors(args.out):
            args.out.write_text(json.dumps(report_to_dict(found), indent=1) + "\n")
    if args.write_placement is not None:
        with naming_write_errors(args.write_placement):
            args.write_placement.write_text(to_json([layer.placement for layer in found.layers]))
    sys.stdout.write("\n".join(format_report(found)) + "\n")
    return 0


def report_to_dict(found: BalanceReport) -> dict[str, object]:
    """Returns the report as JSON types: multiples of the mean load of each layer, and their means."""
    return {**dataclasses.asdict(found), "mean_over_layers": found.means}


def format_report(found: BalanceReport) -> list[str]:
    """Returns the lines to print."""
    rows = [(str(number), [getattr(layer, name) for name in LOADS]) for number, layer in enumerate(found.layers)]
    rows.append(("mean", list(found.means.values())))
    gain = 1 - found.means["balanced"] / found.means["present"]
    return [
        f"steps {found.first_step} to {found.last_step}, experts of a layer over {found.num_ranks} ranks; load of the "
        "busiest expert and the busiest rank as a multiple of the mean:",
        "layer" + "".join(f"{name.replace('_', ' '):>16}" for name in LOADS),
        *(f"{label:>5}" + "".join(f"{value:16.3f}" for value in values) for label, values in rows),
        f"with the balanced placement the busiest ranks have {gain:.1%} less to compute (mean over layers)",
    ]
