"""Check that a few steps move activations as much in a wide or deep model as in a small one.

    optimus coordinate-check --widths 64,128,256,512 --parametrization mup --base-hidden-size 64 \\
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --vocab-size 512 --lr 1e-2

All options of `optimus pretrain` can follow: they are the base model, whose heads and inner widths grow in proportion.
The tokens are random, and models run whole on one device. With mup or completep the standard parametrization is
measured too, for comparison. A slope of 0 is flat, 1 grows as the width or the depth. See docs/rates.md.

Exit code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.optimus.config.checks import check
from megatron.optimus.config.load import Parser, add_run_options, read_run, whole_number
from megatron.optimus.config.schema import ConfigError, ModelConfig, Parametrization, RunConfig
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.report import figure, plot

_OF_A_PARAMETRIZATION = ("base_hidden_size", "base_num_layers", "base_ffn_hidden_size", "base_moe_ffn_hidden_size")
_GROWS = 0.3  # slope from which an activation is said to grow; noise of small models stays below


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus coordinate-check``; returns the exit code."""
    parser = Parser("coordinate-check", __doc__ or "")
    parser.add_argument("--widths", type=_sizes, metavar="N,N,...", help="values of hidden_size to compare")
    parser.add_argument("--depths", type=_sizes, metavar="N,N,...", help="values of num_layers to compare")
    parser.add_argument("--steps", type=whole_number(), default=5, metavar="N", help="optimizer steps [5]")
    parser.add_argument("--num-seeds", type=whole_number(), default=1, metavar="N", help="models to average over [1]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the changes as .png, .svg or .pdf")
    add_run_options(parser)
    args = parser.parse(argv)
    run = read_run(args)
    if not args.widths and not args.depths:
        raise ConfigError("--widths and --depths are both absent: name what to compare, such as --widths 64,128,256")
    check(run.config, 1)
    rows = _measure(run.config, args)
    sys.stdout.write("\n".join(_tables(rows)) + "\n")
    if args.out is not None:
        with naming_write_errors(args.out):
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        figure.draw(args.plot, _panels(rows, args.steps))
    return 0


def _sizes(text: str) -> list[int]:
    """An argparse type: different whole numbers of 1 or more with commas between them."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words) or len(set(words)) < max(2, len(words)):
        raise argparse.ArgumentTypeError(f"{text!r} must be two or more different whole numbers, such as 64,128,256")
    return sorted(int(word) for word in words)


def _measure(config: RunConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each parametrization and kind of size: sizes, activations by name, and their slopes."""
    from megatron.optimus.training.coordinate_check import measure, scaled, slope  # imports torch and DeepSpeed

    standard: dict[str, Any] = {"parametrization": Parametrization.STANDARD} | dict.fromkeys(_OF_A_PARAMETRIZATION)
    models: list[ModelConfig] = [replace(config.model, **standard)]
    if config.model.parametrization is not Parametrization.STANDARD:
        models.insert(0, config.model)
    rows = []
    for model in models:
        for axis, sizes in (("width", args.widths), ("depth", args.depths)):
            if not sizes:
                continue
            runs = [replace(config, model=scaled(model, **{axis: size})) for size in sizes]
            for one in runs:
                check(one, 1)
            found = [asdict(measure(one, args.steps, args.num_seeds)) for one in runs]
            row: dict[str, Any] = {"parametrization": model.parametrization.value, "axis": axis, "sizes": sizes}
            for kind in ("start", "change"):
                row[kind] = {name: [one[kind][name] for one in found] for name in found[0][kind]}
                row[f"{kind}_slope"] = {name: slope(sizes, values) for name, values in row[kind].items()}
            rows.append(row | {"steps": args.steps, "lr": config.optimizer.lr})
    return rows


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        for kind, what in (("start", "at the start"), ("change", f"change after {row['steps']} steps")):
            title = f"{row['parametrization']}, {what} (root mean square), {row['axis']}:"
            lines.append(f"{title:<58}" + "".join(f"{size:>9}" for size in row["sizes"]) + "    slope")
            for name, values in row[kind].items():
                found = row[f"{kind}_slope"][name]
                note = "  grows" if kind == "change" and found > _GROWS else ""
                numbers = "".join(f"{plot.number(value):>9}" for value in values)
                lines.append(f"    {name:<54}{numbers}{found:>9.2f}{note}")
            lines.append("")
    return lines[:-1]


def _panels(rows: Sequence[dict[str, Any]], steps: int) -> list[figure.Panel]:
    values = [value for row in rows for line in row["change"].values() for value in line]
    span = (min(values) / 1.5, max(values) * 1.5)
    return [
        figure.Panel(
            f"{row['parametrization']}: change after {steps} steps",
            row["axis"],
            "root mean square",
            {
                f"{name} ({row['change_slope'][name]:+.2f})": (row["sizes"], line)
                for name, line in row["change"].items()
            },
            is_log_y=True,
            y_range=span,
        )
        for row in rows
    ]
