"""Train a byte-level BPE tokenizer on JSON lines; the folder it writes also loads in transformers.

optimus train-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer/
"""

from __future__ import annotations

import logging
import sys
import time

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.corpus import expand_inputs, read_documents
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 after one line that says what is wrong with the data, 2 with the command line."""
    parser = Parser("train-tokenizer", __doc__ or "")
    parser.add_argument("--input", nargs="+", required=True, help="JSON-lines files or globs; .gz and .zst too")
    parser.add_argument("--vocab-size", type=whole_number(), required=True, help="entries, at least 257")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--json-key", "--json-keys", default="text", help="key that holds the text")
    parser.add_argument("--special-tokens", nargs="*", default=[], help="names, for example <fim_prefix> <fim_middle>")
    parser.add_argument("--skip-malformed", action="store_true", help="leave malformed lines out and count them")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    started = time.monotonic()
    try:
        args = parser.parse(argv)
        texts = read_documents(expand_inputs(args.input), args.json_key, args.skip_malformed)
        train_bpe(texts, args.vocab_size, args.output, args.special_tokens)
        tokenizer = build_tokenizer(TokenizerType.HF, args.output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{args.output}: {tokenizer.vocab_size} tokens, end of document {tokenizer.eod_id}, {seconds:.1f} s")
    return 0
