"""Tokenize JSON lines, parquet or text files into Megatron .bin/.idx files.

    optimus preprocess --input corpus/*.jsonl.gz --output-prefix data/corpus \
        --tokenizer-model tokenizer/ --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; give their common prefix to --data-path of `optimus pretrain`. Documents
are shuffled, and splits by the hash of their text prepared; --split-by position keeps the order of the input. Under
mpiexec, srun or a SLURM job array the processes divide the files; elsewhere set --rank and --world-size. A command that
was killed continues when it is started again with the same options.

Exit code: 0, 1 after one line about the data, or 2 after one about the command line.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, SplitBy, TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.ordered import is_ordered
from megatron.optimus.data.tokenize.corpus import MAX_LINE_BYTES
from megatron.optimus.data.tokenize.preprocess import PreprocessReport, log_progress, preprocess
from megatron.optimus.platform import environment
from megatron.optimus.platform.hub import local_folder
from megatron.optimus.platform.log import counted, print_error, prints_errors
from megatron.optimus.platform.progress import Progress, StderrHandler

logger = logging.getLogger("optimus")

_JUDGED_FILES = 8  # that are looked at for their order
_SHOWN_PREFIXES = 8  # in the line for the next command


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("preprocess", __doc__ or "")
    parser.add_argument(
        "--input", nargs="+", required=True, help="files, globs or folders: .jsonl, .parquet, .txt; .gz, .zst"
    )
    parser.add_argument(
        "--output-prefix", required=True, help="prefix of the files to write: <prefix>_<key>_document.bin and .idx"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys to tokenize, each into its own pair of files; default: text",
    )
    parser.add_enum("--tokenizer-type", members=TokenizerType, help="type of the tokenizer; default: as its file says")
    parser.add_argument("--tokenizer-model", help="file or folder of the tokenizer")
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="the name of a special token in a text is its id, as in Megatron's script; default: it is letters",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=whole_number(), default=os.cpu_count() or 1, help="processes; default: one per core"
    )
    parser.add_argument("--skip-malformed", action="store_true", help="skip malformed lines and count them")
    parser.add_argument("--partitions", type=int, help="number of parts of the input; default: parts of 1 GiB")
    parser.add_argument("--per-file", action="store_true", help="write <prefix>/<file>_<key>_document for each file")
    parser.add_enum(
        "--split-by",
        members=(SplitBy.HASH, SplitBy.POSITION),
        default=SplitBy.HASH,
        help="hash: shuffle documents and prepare splits by the hash of their text; position: keep the order of the "
        "input; default: hash",
    )
    parser.add_argument("--shuffle", action="store_true", help="shuffle documents with --split-by position too")
    parser.add_argument("--seed", type=whole_number(0), default=1234, help="of the shuffled order; default: 1234")
    parser.add_argument("--overwrite", action="store_true", help="replace token files of an earlier run")
    parser.add_argument("--rank", type=int, help="number of this process; default: from the launcher")
    parser.add_argument("--world-size", type=int, help="processes that divide the files; default: from the launcher")
    parser.add_argument(
        "--max-line-bytes",
        type=whole_number(),
        default=MAX_LINE_BYTES,
        help=f"longest line, or text that is a file, in uncompressed bytes; default: {MAX_LINE_BYTES}",
    )
    parser.add_argument(
        "--log-interval", type=whole_number(), help="documents between lines of the log; default: a line every 10 s"
    )
    args = parser.parse(argv)
    if (args.rank is None) != (args.world_size is None):
        parser.error("--rank and --world-size go together")
    return args


def progress_text(report: PreprocessReport) -> str:
    """Describes what has been read so far and how fast."""
    if report.merging:
        return f"joining the parts, {report.documents} documents"
    speed = f"{report.input_bytes / 1e6 / max(report.seconds, 1e-9):.2f} MB/s"
    skipped = f", {report.malformed} malformed" if report.malformed else ""
    return f"{report.documents} documents, {speed}{skipped}"


@prints_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus preprocess``; returns the exit code, 130 after an interrupt."""
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[StderrHandler()])
    # SIGTERM is an exception, so that temporary files are deleted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not args.append_eod:
        logger.warning("without --append-eod the model does not see where a document ends")
    try:
        rank, world_size = environment.worker_index_and_count() if args.rank is None else (args.rank, args.world_size)
        with Progress("preprocess") as progress:
            report = preprocess(
                args.input,
                args.output_prefix,
                tokenizer_type=args.tokenizer_type,
                tokenizer_model=None if args.tokenizer_model is None else str(local_folder(args.tokenizer_model)),
                json_keys=args.json_keys,
                append_eod=args.append_eod,
                workers=args.workers,
                skip_malformed=args.skip_malformed,
                log_interval=args.log_interval,
                partitions=args.partitions,
                per_file=args.per_file,
                split_by=args.split_by,
                shuffle=args.shuffle,
                seed=args.seed,
                rank=rank,
                world_size=world_size,
                overwrite=args.overwrite,
                parse_special_tokens=args.parse_special_tokens,
                max_line_bytes=args.max_line_bytes,
                show_progress=lambda report: progress.update(report.progress, progress_text(report)),
            )
    except (DataError, ConfigError) as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues after the last finished part", file=sys.stderr)
        return 130
    log_progress(report)
    if report.partitions_found:
        print(f"{report.partitions_found} parts were done before, {report.partitions_done} now")
    if not report.merged:
        print("the parts of this process are done; the last process to finish merges all parts")
        return 0
    if report.empty_documents:
        logger.warning("%d documents have no tokens", report.empty_documents)
    if args.split_by is SplitBy.POSITION and not args.shuffle:
        for prefix in list(report.tokens)[:_JUDGED_FILES]:
            if is_ordered(prefix):
                logger.warning(
                    "%s: the documents at an end of it are unlike the others; leave out --split-by "
                    "position, or add --shuffle, unless another program splits it",
                    prefix,
                )
    for prefix, tokens in report.tokens.items():
        print(f"{prefix}.bin {prefix}.idx: {tokens} tokens")
    empty = f", {counted(report.empty_files, 'empty file')} skipped" if report.empty_files else ""
    print(f"for optimus pretrain: --data-path {shlex.join(list(report.tokens)[:_SHOWN_PREFIXES])}")
    print(f"{report.documents} documents, {report.malformed} malformed lines skipped{empty}")
    return 0
