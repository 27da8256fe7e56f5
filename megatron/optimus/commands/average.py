"""Average the weights of checkpoints of one model (docs/converters.md).

    optimus average runs/a runs/b runs/c --out soup
    optimus average run/checkpoints/step-00009000 run/checkpoints/step-00010000 --out soup --weights 1,3

Checkpoints may be Optimus's of any layout or Hugging Face folders. The result is a checkpoint of weights only, which
`optimus pretrain --load`, `evaluate`, `generate` and `convert` take.

Exit code: 0, or 2 where nothing was written, after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.commands.convert import parse_size
from megatron.optimus.config.load import Parser
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.convert import DEFAULT_MAX_SHARD_BYTES, Options
from megatron.optimus.convert.average import average
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.platform.progress import Progress, StderrHandler


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,1,2") from None


def _parser() -> Parser:
    parser = Parser("average", __doc__ or "", usage="optimus average CHECKPOINT CHECKPOINT ... --out DIR [options]")
    text = "folder of a checkpoint, or of checkpoints (the newest one), or of a Hugging Face model"
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    text = "one number for each checkpoint; they need not sum to one; default: all alike"
    parser.add_argument("--weights", type=_numbers, metavar="W1,W2", help=text)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype to write; default: fp32")
    text = "largest size of a file; default: 5GB"
    parser.add_argument("--max-shard-size", type=parse_size, default=DEFAULT_MAX_SHARD_BYTES, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    return parser


@prints_errors(CheckpointError, ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus average``; returns 0, 2 after one line that says what is wrong, or 130 after an interrupt."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[StderrHandler()])
    args = _parser().parse(argv)
    try:
        with Progress("average") as progress:
            result = average(
                args.checkpoints,
                args.out,
                args.weights,
                options=Options(args.dtype, max_shard_bytes=args.max_shard_size),
                overwrite=args.overwrite,
                show_progress=lambda fraction: progress.update(fraction, "reading and writing tensors"),
            )
        size = f"{len(result.tensors)} tensors, {result.num_bytes:,} bytes"
        print(f"wrote {result.destination}: {size}, the average of {len(args.checkpoints)} checkpoints")
    except KeyboardInterrupt:
        print(f"interrupted; {args.out} is as it was", file=sys.stderr)
        return 130
    return 0
