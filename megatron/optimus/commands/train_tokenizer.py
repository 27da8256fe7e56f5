"""Train a byte-level BPE tokenizer on JSON lines.

    optimus train-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer/

The folder it writes also loads in transformers.

Exit code: 0, 1 after one line about the data, or 2 after one about the command line.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.config.tokenizer_files import definition_file
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.corpus import MAX_LINE_BYTES, expand_inputs, read_documents
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe
from megatron.optimus.platform.log import prints_errors
from megatron.optimus.platform.progress import Progress, StderrHandler


@prints_errors(ConfigError)
@prints_errors(DataError, code=1)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus train-tokenizer``; returns the exit code."""
    parser = Parser("train-tokenizer", __doc__ or "")
    parser.add_argument("--input", nargs="+", required=True, help="JSON-lines files or globs; .gz and .zst too")
    parser.add_argument("--vocab-size", type=whole_number(), required=True, help="number of tokens, at least 257")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--json-key", "--json-keys", default="text", help="key of the text; default: text")
    parser.add_argument(
        "--special-tokens", nargs="*", default=[], help="special tokens, such as <fim_prefix> <fim_middle>"
    )
    parser.add_argument(
        "--max-line-bytes",
        type=whole_number(),
        default=MAX_LINE_BYTES,
        help=f"longest line, or text that is a file, in uncompressed bytes; default: {MAX_LINE_BYTES}",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier tokenizer")
    parser.add_argument("--skip-malformed", action="store_true", help="skip malformed lines and count them")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[StderrHandler()])
    started = time.monotonic()
    args = parser.parse(argv)
    if not args.overwrite and (file := definition_file(TokenizerType.HF, args.output)) is not None:
        raise DataError(f"{file}: is there already; add --overwrite to replace it, or name another --output")
    with Progress("train-tokenizer") as progress:
        texts = _texts(args, progress)
        train_bpe(texts, args.vocab_size, args.output, args.special_tokens)
    tokenizer = build_tokenizer(TokenizerType.HF, args.output)
    seconds = time.monotonic() - started
    print(f"{args.output}: {tokenizer.vocab_size} tokens, end of document {tokenizer.eod_id}, {seconds:.1f} s")
    return 0


def _texts(args: argparse.Namespace, progress: Progress) -> Iterator[str]:
    """Yields the documents to train on, and updates the progress."""
    read = 0

    def show(fraction: float, documents: int) -> None:
        nonlocal read
        read = documents
        progress.update(fraction, f"{documents} documents read")

    yield from read_documents(expand_inputs(args.input), args.json_key, args.skip_malformed, args.max_line_bytes, show)
    progress.update(None, f"all {read} documents read, choosing {args.vocab_size} tokens")
