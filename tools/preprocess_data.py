#!/usr/bin/env python3
"""Tokenizes JSON lines into Megatron .bin/.idx files.

    python tools/preprocess_data.py --input corpus/*.jsonl.gz --output-prefix data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, whose common prefix is what --data-path of the training command takes.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, without installation

from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.preprocess import log_progress, preprocess

logger = logging.getLogger("optimus")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokenize JSON lines into Megatron .bin/.idx files")
    parser.add_argument("--input", nargs="+", required=True, help="JSON-lines files or globs; .gz and .zst too")
    parser.add_argument("--output-prefix", required=True, help="writes <prefix>_<key>_document.bin and .idx")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, one pair of files each")
    parser.add_argument("--tokenizer-type", choices=[t.value for t in TokenizerType], default=TokenizerType.HF.value)
    parser.add_argument("--tokenizer-model", help="file or folder of the tokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument("--skip-malformed", action="store_true", help="leave malformed lines out and count them")
    parser.add_argument("--log-interval", type=int, default=10000, help="documents between progress lines")
    args = parser.parse_args(argv)
    if args.workers < 1 or args.log_interval < 1:
        parser.error("--workers and --log-interval must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so temporary files go
    if not args.append_eod:
        logger.warning("without --append-eod the model cannot see where a document ends")
    try:
        report = preprocess(
            args.input,
            args.output_prefix,
            tokenizer_type=TokenizerType(args.tokenizer_type),
            tokenizer_model=args.tokenizer_model,
            json_keys=args.json_keys,
            append_eod=args.append_eod,
            workers=args.workers,
            skip_malformed=args.skip_malformed,
            log_interval=args.log_interval,
        )
    except (DataError, ConfigError) as error:
        print(f"preprocess_data: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; nothing written", file=sys.stderr)
        return 130
    log_progress(report)
    if report.empty_documents:
        logger.warning("%d documents have no tokens", report.empty_documents)
    for prefix, tokens in report.tokens.items():
        print(f"{prefix}.bin {prefix}.idx: {report.documents} documents, {tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
