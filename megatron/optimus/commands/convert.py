"""Convert a model between Optimus, Hugging Face, Megatron and DeepSpeed checkpoints (docs/converters.md).

    optimus convert runs/demo exported --to hf          # newest checkpoint of a run
    optimus convert Mixtral-8x7B-v0.1 mixtral --to optimus --verify
    optimus convert runs/demo mcore --to megatron --target-tensor-parallel-size 2
    optimus convert runs/demo exported --to hf --push OWNER/NAME
    optimus convert deepspeed_run ours --to optimus --model-config config.json

Exit code: 0, or 2 where nothing was written, after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.convert import DEFAULT_MAX_SHARD_BYTES, FORMATS, Conversion, Options, convert
from megatron.optimus.convert.deepspeed import NAMES
from megatron.optimus.convert.formats import CardOptions
from megatron.optimus.platform.hub import check_push, local_folder, push, push_address
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.platform.progress import Progress, StderrHandler

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Returns the number of bytes of a text such as "5GB", "200MB" or "1000"."""
    match = re.fullmatch(r"(\d+) *([KMG]B)?", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 200MB")
    return int(match[1]) * _UNITS[match[2] or ""]


def _parser() -> Parser:
    parser = Parser("convert", __doc__ or "", usage="optimus convert SOURCE DESTINATION --to FORMAT [options]")
    text = "folder of a checkpoint, or of checkpoints (the newest one), or hf://OWNER/NAME[@REVISION]"
    parser.add_argument("source", type=Path, help=text)
    parser.add_argument("destination", type=Path, help="folder to create")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of the destination")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "source"),
        help="dtype to write; default: as stored, for a full checkpoint the run's params_dtype",
    )
    text = "file or folder of the tokenizer, for hf; default: the one inside the checkpoint"
    parser.add_argument("--tokenizer-model", "--tokenizer", type=Path, help=text)
    parser.add_enum("--tokenizer-type", members=TokenizerType, help="type of the tokenizer; default: as its file says")
    size = "largest size of a file; default: 5GB"
    parser.add_argument("--max-shard-size", type=parse_size, default=DEFAULT_MAX_SHARD_BYTES, help=size)
    parser.add_argument("--model-config", type=Path, help="config.json or YAML of the model, for sources without")
    parser.add_argument("--names", choices=NAMES, default="optimus", help="names of parameters, for zero and universal")
    for kind in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--target-{kind}-parallel-size",
            type=whole_number(),
            default=1,
            help=f"{kind} parallel size of the destination, for megatron",
        )
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="names of modules, for megatron",
    )
    text = "licence of the model card, for hf: an identifier of the hub such as apache-2.0, or a name"
    parser.add_argument("--license", help=text)
    text = "results of `optimus evaluate --out` for the model card; may be given several times"
    parser.add_argument("--evaluation", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "upload the result to the Hugging Face hub, for hf; private unless --public is given"
    parser.add_argument("--push", metavar="OWNER/NAME", help=text)
    parser.add_argument("--public", action="store_true", help="with --push: everyone may see it")
    text = "trained: the weights as trained; ema: their moving average, of a run with --ema-decay"
    parser.add_argument("--weights", choices=("trained", "ema"), default="trained", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare every tensor")
    parser.add_argument("--dry-run", action="store_true", help="list the tensors, write nothing")
    return parser


@prints_errors(CheckpointError, ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus convert``; returns 0, 2 after one line that says what is wrong, or 130 after an interrupt."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[StderrHandler()])
    args = _parser().parse(argv)
    try:
        _check_push(args)
        options = Options(
            args.dtype,
            None if args.tokenizer_model is None else local_folder(args.tokenizer_model),
            args.max_shard_size,
            args.names,
            args.target_tensor_parallel_size,
            args.target_pipeline_parallel_size,
            args.target_expert_parallel_size,
            args.transformer_impl == "transformer_engine",
            args.tokenizer_type,
            CardOptions(args.push or args.destination.resolve().name, args.license, tuple(args.evaluation)),
        )
        with Progress("convert") as progress:
            result = convert(
                args.source,
                args.destination,
                to=args.to,
                options=options,
                model_config=args.model_config,
                averaged=args.weights == "ema",
                overwrite=args.overwrite,
                dry_run=args.dry_run,
                verify=args.verify,
                show_progress=lambda fraction: progress.update(fraction, "reading and writing tensors"),
            )
        _report(args, result)
        if args.push is not None and not args.dry_run:
            push(result.destination, args.push, public=args.public)
            print(f"uploaded to {push_address(args.push)}, {'public' if args.public else 'private'}")
    except KeyboardInterrupt:
        print(f"interrupted; {args.destination} is as it was", file=sys.stderr)
        return 130
    return 0


def _check_push(args: argparse.Namespace) -> None:
    """Raises ConfigError before the work where its result could not be uploaded."""
    if args.push is None:
        if args.public:
            raise ConfigError("--public says who may see an upload; name the model with --push OWNER/NAME")
    elif args.to != "hf":
        raise ConfigError(f"--push uploads a model for transformers, and --to is {args.to}; use --to hf")
    elif args.dry_run:
        push_address(args.push)
    else:
        check_push(args.push, public=args.public)


def _report(args: argparse.Namespace, result: Conversion) -> None:
    """Prints what was, or would be, written and uploaded."""
    if args.dry_run:
        for tensor in result.tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            print(f"{tensor.name}  {dtype}  {list(tensor.shape)}  {tensor.num_bytes:,} bytes")
    verb = "would write" if args.dry_run else "wrote"
    size = f"{len(result.tensors)} tensors, {result.num_bytes:,} bytes"
    print(f"{verb} {result.destination}: {size}, from {result.source}")
    if args.verify and not args.dry_run:
        print(f"read back and compared: {result.compared} tensors, all equal")
    if args.push is not None and args.dry_run:
        who = "public" if args.public else "private"
        print(f"would upload to {push_address(args.push)}, {who}: {', '.join(result.files)}")
