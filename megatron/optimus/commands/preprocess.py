"""Tokenize JSON lines, parquet or text files into Megatron .bin/.idx files.

    optimus preprocess --input corpus/*.jsonl.gz --output-prefix data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, whose common prefix is what --data-path of the training command takes.
Under mpiexec, srun or a SLURM job array each process takes its share of the files; --rank and --world-size say so
elsewhere. A run that was killed goes on when it is started again in the same way.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, log_progress, preprocess
from megatron.optimus.platform import environment as launch_env

logger = logging.getLogger("optimus")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("preprocess", __doc__ or "")
    parser.add_argument(
        "--input", nargs="+", required=True, help="files, globs or folders: .jsonl, .parquet, .txt; .gz, .zst"
    )
    parser.add_argument("--output-prefix", required=True, help="writes <prefix>_<key>_document.bin and .idx")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize, one pair of files each")
    parser.add_argument("--tokenizer-type", choices=[t.value for t in TokenizerType], default=TokenizerType.HF.value)
    parser.add_argument("--tokenizer-model", help="file or folder of the tokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=whole_number(), default=os.cpu_count() or 1, help="processes; default: one a core"
    )
    parser.add_argument("--skip-malformed", action="store_true", help="leave malformed lines out and count them")
    parser.add_argument("--partitions", type=int, help="cut the input into so many parts; default: 1 GiB each")
    parser.add_argument("--per-file", action="store_true", help="a pair <prefix>/<file>_<key>_document for each file")
    parser.add_argument("--rank", type=int, help="of this process; default: what the launcher says")
    parser.add_argument("--world-size", type=int, help="processes that share the work; default: what the launcher says")
    parser.add_argument("--log-interval", type=whole_number(), default=10000, help="documents between progress lines")
    args = parser.parse(argv)
    if (args.rank is None) != (args.world_size is None):
        parser.error("--rank and --world-size go together")
    return args


def show_bar(report: PreprocessReport) -> None:
    """The progress line of a terminal: rewritten in place."""
    width, seconds = 30, max(report.seconds, 1e-9)
    done = round(width * min(1.0, report.progress))
    left = seconds * (1 - report.progress) / report.progress if report.progress > 0 else 0.0
    sys.stderr.write(
        f"\r[{'#' * done}{'.' * (width - done)}] {100 * report.progress:5.1f} %  {report.documents} documents  "
        f"{report.documents / seconds:.0f}/s  {report.input_bytes / 1e6 / seconds:.2f} MB/s  {left:.0f} s left   "
    )
    sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 after one line on the data, 2 after one on the command line, 130 after an interrupt."""
    try:
        args = parse_args(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so temporary files go
    if not args.append_eod:
        logger.warning("without --append-eod the model cannot see where a document ends")
    terminal = sys.stderr.isatty()
    try:
        rank, world_size = launch_env.share() if args.rank is None else (args.rank, args.world_size)
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
            partitions=args.partitions,
            per_file=args.per_file,
            rank=rank,
            world_size=world_size,
            show_progress=show_bar if terminal else None,
        )
    except (DataError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; start it again to go on after the last finished part", file=sys.stderr)
        return 130
    if terminal:
        sys.stderr.write("\n")
    log_progress(report)
    if report.partitions_found:
        print(f"{report.partitions_found} parts were there already, {report.partitions_done} were done now")
    if not report.merged:
        print("this process's parts are done; the last process to finish joins all of them")
        return 0
    if report.empty_documents:
        logger.warning("%d documents have no tokens", report.empty_documents)
    for prefix, tokens in report.tokens.items():
        print(f"{prefix}.bin {prefix}.idx: {tokens} tokens")
    print(f"{report.documents} documents, {report.malformed} malformed left out")
    return 0
