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
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.optimus.commands.model_options import add_model_options, load_model, run_on_ranks
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.errors import DataError
from megatron.optimus.inference.generate import Completion, Limits, Speed, generate
from megatron.optimus.inference.load import on_all_ranks
from megatron.optimus.inference.prompts import read_prompts
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.score import Score, score
from megatron.optimus.platform.environment import RankEnvironment
from megatron.optimus.platform.log import printable
from megatron.optimus.platform.progress import Progress
from megatron.optimus.platform.ranks import Ranks


def _parser() -> Parser:
    usage = "optimus generate CHECKPOINT (--prompt TEXT | --prompts FILE) [options]"
    parser = Parser("generate", __doc__ or "", usage=usage)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its newest checkpoint)")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompts", type=Path, help='JSON lines with a field "prompt"')
    parser.add_argument("--out", type=Path, help="new file for JSON lines; default: stdout")
    parser.add_argument("--score", action="store_true", help="give the log-probabilities of the prompts' own tokens")
    _add_sampling_options(parser)
    add_model_options(parser)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus generate``; returns 0, 2 after one line that says what is wrong, or 1 if another rank ended."""
    return run_on_ranks(_parser(), argv, _prepare)


def _prepare(args: argparse.Namespace) -> Callable[[RankEnvironment, Ranks], None]:
    """Checks the options; returns what every rank runs."""
    if not args.prompt and args.prompts is None:
        raise ConfigError("nothing to continue; give --prompt TEXT or --prompts FILE")
    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    limits = Limits(args.max_new_tokens, tuple(args.stop), args.ignore_eos)
    return lambda launch, ranks: _run(args, launch, ranks, sampling, limits)


def _run(args: argparse.Namespace, launch: RankEnvironment, ranks: Ranks, sampling: Sampling, limits: Limits) -> None:
    """Reads prompts, loads the model, and writes what it says. Collective."""
    prompts = _same_prompts(args, ranks)
    output = on_all_ranks(ranks, lambda: _Output(args.out, is_rank_0=ranks.rank == 0), "opening --out", ConfigError)
    with output, Progress("generate") if output.shows_progress else contextlib.nullcontext() as progress:
        began = time.perf_counter()
        loaded = load_model(args, launch, ranks)
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
