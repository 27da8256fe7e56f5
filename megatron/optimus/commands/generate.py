"""Generate text from a checkpoint, or score given text (docs/inference.md).

    optimus generate runs/demo --prompt "Once upon a time"
    optimus generate runs/demo --prompts prompts.jsonl --out completions.jsonl --temperature 0
    optimus generate exported --prompt "Once upon a time" --score
    torchrun --nproc-per-node 2 -m megatron.optimus generate runs/demo --prompts prompts.jsonl \\
        --tensor-model-parallel-size 2

The checkpoint is one of Optimus, the folder of a run (its newest), or a folder of another format that converts, such as
Hugging Face's. One prompt is answered as text while it comes, several as JSON lines. Exit code: 0, or 2 after one line
that says what is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.config.choices import Backend, Device, TokenizerType
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, ParallelConfig
from megatron.optimus.data.errors import DataError
from megatron.optimus.inference.generate import Completion, Limits, Speed, generate
from megatron.optimus.inference.load import TextModel, load_text_model, on_all_ranks
from megatron.optimus.inference.prompts import read_prompts
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import Score, score
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import environment, process_groups
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.log import print_error, printable
from megatron.optimus.platform.progress import Progress, StderrHandler
from megatron.optimus.platform.ranks import REPORTED_BY_ANOTHER_RANK, Ranks

USER_ERRORS = (ConfigError, DataError, CheckpointError)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _parser() -> Parser:
    usage = "optimus generate CHECKPOINT (--prompt TEXT | --prompts FILE) [options]"
    parser = Parser("generate", __doc__ or "", usage=usage)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompts", type=Path, help='JSON lines with a field "prompt"')
    parser.add_argument("--out", type=Path, help="new file for JSON lines; default: stdout")
    parser.add_argument("--score", action="store_true", help="give the log-probabilities of the prompts' own tokens")
    _add_sampling_options(parser)
    _add_model_options(parser)
    return parser


def _add_sampling_options(parser: Parser) -> None:
    parser.add_argument("--logprobs", action="store_true", help="add log-probabilities of the tokens to JSON lines")
    parser.add_argument("--max-new-tokens", type=whole_number(), default=128, help="most tokens; default: 128")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely tokens; default: 1.0")
    parser.add_argument("--top-k", type=whole_number(0), default=0, help="keep the K likeliest tokens; default: all")
    text = "keep the likeliest tokens whose probabilities sum to this; default: 1.0 (all)"
    parser.add_argument("--top-p", type=float, default=1.0, help=text)
    text = "keep tokens with this share of the highest probability; default: 0.0 (all)"
    parser.add_argument("--min-p", type=float, default=0.0, help=text)
    text = "divide the positive logits of tokens that were there by this, multiply the others; default: 1.0"
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help=text)
    text = "end a completion before this text; may be given several times"
    parser.add_argument("--stop", action="append", default=[], help=text)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the token that ends texts")
    parser.add_argument("--seed", type=whole_number(0), default=1234, help="of the random numbers; default: 1234")


def _add_model_options(parser: Parser) -> None:
    parser.add_argument("--batch-size", type=whole_number(), default=8, help="prompts at a time; default: 8")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="dtype of the weights; default: as trained or stored")
    text = "file or folder of the tokenizer; default: the checkpoint's"
    parser.add_argument("--tokenizer-model", "--tokenizer", metavar="PATH", help=text)
    names = [kind.value for kind in TokenizerType]
    parser.add_argument("--tokenizer-type", choices=names, help="default: the checkpoint's")
    for kind in ("tensor", "expert"):
        text = f"ranks over which {'matrices' if kind == 'tensor' else 'experts'} are split; default: 1"
        parser.add_argument(f"--{kind}-model-parallel-size", type=whole_number(), default=1, help=text)
    parser.add_argument("--device", choices=[one.value for one in Device], default="auto", help="default: auto")
    backends = [one.value for one in Backend]
    parser.add_argument("--distributed-backend", choices=backends, default="auto", help="default: auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus generate``; returns 0, 2 after one line that says what is wrong, or 1 if another rank ended."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[StderrHandler()])
    rank, met_others = 0, False
    try:
        launch = environment.detect()
        rank = launch.rank
        args = _parser().parse(argv)
        if not args.prompt and args.prompts is None:
            raise ConfigError("nothing to continue; give --prompt TEXT or --prompts FILE")
        sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
        limits = Limits(args.max_new_tokens, tuple(args.stop), args.ignore_eos)
        met_others = True
        with _all_ranks(args, launch) as ranks:
            _run(args, launch, ranks, sampling, limits)
    except USER_ERRORS as error:
        if rank == 0:
            print_error(error)
        elif met_others and not getattr(error, REPORTED_BY_ANOTHER_RANK, False):
            print_error(error, f"error on rank {rank}")
        return 2
    except RuntimeError as error:
        if (reason := process_groups.lost_peer_reason(error)) is None:
            raise
        print_error(f"another rank has ended ({reason}); that rank or the launcher says why", f"error on rank {rank}")
        return 1
    return 0


@contextlib.contextmanager
def _all_ranks(args: argparse.Namespace, launch: RankEnvironment) -> Iterator[Ranks]:
    """Gives the ranks that compute together, each with its device set; one process makes no process group."""
    device = devices.device_for_rank(Device(args.device), launch.local_rank)
    devices.set_device(device)
    devices.set_cpu_threads(launch)
    if launch.world_size == 1:
        yield Ranks(None, device)
        return
    process_groups.init(launch, device, Backend(args.distributed_backend), timedelta(minutes=10))
    try:
        yield Ranks(None, device)
    except BaseException:
        process_groups.leave_after_error(process_groups.shutdown)
        raise
    process_groups.shutdown()


def _run(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks, sampling: Sampling, limits: Limits) -> None:
    """Reads prompts, loads the model, and writes what it says. Collective."""
    prompts = _same_prompts(args, ranks)
    output = on_all_ranks(ranks, lambda: _Output(args.out, is_rank_0=ranks.rank == 0), "opening --out", ConfigError)
    with output, Progress("generate") if output.shows_progress else contextlib.nullcontext() as progress:
        began = time.perf_counter()
        loaded = _load(args, launch, ranks)
        load_seconds = time.perf_counter() - began
        # An empty prompt begins where a document does: after the token that ends the one before.
        ids = [loaded.tokenizer.encode(prompt) or [loaded.tokenizer.eod_id] for prompt in prompts]
        speed, streams = Speed(), len(prompts) == 1 and args.out is None and not args.score
        show = output.show if streams else None
        results: Iterator[Completion | Score] = (
            score(loaded, ids, batch_size=args.batch_size)
            if args.score
            else generate(loaded, ids, sampling, limits, batch_size=args.batch_size, show=show, speed=speed)
        )
        for number, result in enumerate(results):
            if not streams:
                output.write({"index": number, "prompt": prompts[number], **_fields(result, ids[number], args)})
            if progress is not None:
                progress.update((number + 1) / len(ids), f"{number + 1} of {len(ids)} prompts")
        if streams:
            output.show("\n")
    if ranks.rank == 0:
        print("; ".join(filter(None, [f"loaded in {load_seconds:.2f} s", str(speed)])), file=sys.stderr)


def _same_prompts(args: argparse.Namespace, ranks: Ranks) -> list[str]:
    """The prompts as rank 0 reads them, on every rank."""
    found = on_all_ranks(
        ranks, lambda: read_prompts(args.prompt, args.prompts) if ranks.rank == 0 else [], "reading prompts", DataError
    )
    prompts: list[str] = json.loads(ranks.broadcast_bytes(json.dumps(found).encode()))
    return prompts


def _load(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks) -> TextModel:
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        device=Device(args.device),
        distributed_backend=Backend(args.distributed_backend),
    )
    return load_text_model(
        args.checkpoint,
        parallel,
        ranks,
        local_world_size=launch.local_world_size,
        dtype=_DTYPES.get(args.dtype),
        tokenizer_type=None if args.tokenizer_type is None else TokenizerType(args.tokenizer_type),
        tokenizer_model=args.tokenizer_model,
    )


def _fields(result: Completion | Score, ids: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a JSON line besides the prompt."""
    if isinstance(result, Score):
        total = math.fsum(result.logprobs)
        return {"token_ids": list(ids), "logprobs": [None, *result.logprobs], "sum": total}
    found = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    return found | ({"logprobs": result.logprobs} if args.logprobs else {})


class _Output:
    """Where results go: a new file or stdout, from rank 0 alone. A context manager."""

    def __init__(self, path: Path | None, *, is_rank_0: bool) -> None:
        self._path, self._stream = path, sys.stdout if is_rank_0 else None
        if path is not None and is_rank_0:
            try:
                self._stream = open(path, "x", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                reason = "is there already; name a new file" if path.exists() else error.strerror
                raise ConfigError(f"--out {path}: {reason}") from error
        self.shows_progress = path is not None and is_rank_0

    def write(self, line: dict[str, Any]) -> None:
        """Writes a JSON line."""
        self._put(json.dumps(line) + "\n")

    def show(self, text: str) -> None:
        """Writes text as it stands, to a terminal with its control characters escaped."""
        is_terminal = self._stream is not None and self._stream.isatty()
        self._put(printable(text) if is_terminal else text)

    def _put(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *error: object) -> None:
        if self._path is not None and self._stream is not None:
            is_empty = self._stream.tell() == 0
            self._stream.close()
            if is_empty:
                self._path.unlink()
