"""Make tasks for `optimus evaluate` from texts that were held out of training (docs/evaluation.md).

    optimus make-tasks data/corpus_text_document --out tasks --part valid
    optimus make-tasks books.jsonl --out tasks --items 500 --words 64 --seed 2
    optimus evaluate runs/demo --tasks held_out_text,held_out_cloze,held_out_choice --include-path tasks

The input is a prefix of a .bin/.idx pair, of which one split is taken, or a file of JSON lines, parquet or text. Exit
code: 0, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.optimus.commands.inspect_data import load_tokenizer
from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, SplitBy, TokenizerType
from megatron.optimus.data.dataset import Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import idx_path
from megatron.optimus.data.tokenize.corpus import expand_inputs, read_documents
from megatron.optimus.data.tokenize.identity import read_identity
from megatron.optimus.inference.held_out import TASKS, held_out_documents, make_tasks
from megatron.optimus.platform.files import naming_write_errors
from megatron.optimus.platform.log import prints_errors


def _parser() -> Parser:
    parser = Parser("make-tasks", __doc__ or "", usage="optimus make-tasks INPUT --out FOLDER [options]")
    parser.add_argument("input", help="prefix of a .bin/.idx pair, or a file of JSON lines, parquet or text")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tasks, for --include-path")
    parser.add_argument("--items", type=whole_number(), default=200, help="questions of each task; default: 200")
    parser.add_argument("--words", type=whole_number(4), default=48, help="words of a passage; default: 48")
    parser.add_argument("--seed", type=whole_number(0), default=1234, help="seed of the drawing; default: 1234")
    parser.add_argument("--json-key", default="text", help="key or column of the text; default: text")
    part = "split of a pair to take; default: valid"
    parser.add_argument("--part", choices=("valid", "test"), default="valid", help=part)
    parser.add_argument("--split", default="969,30,1", help="as in training; default: 969,30,1")
    by = "as in training; default: hash where the pair is prepared for it, else position"
    parser.add_enum("--split-by", members=SplitBy, default=SplitBy.AUTO, help=by)
    parser.add_enum("--tokenizer-type", members=TokenizerType, help="of a pair; default: as its file says")
    parser.add_argument("--tokenizer-model", help="file or folder of a pair's tokenizer; default: as the pair says")
    return parser


@prints_errors(DataError, ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus make-tasks``; returns the exit code."""
    args = _parser().parse(argv)
    texts = _texts(args)
    with naming_write_errors(args.out):
        counts = make_tasks(texts, args.out, items=args.items, num_words=args.words, seed=args.seed)
    print(", ".join(f"{task}: {count} questions" for task, count in counts.items()))
    print(f"optimus evaluate CHECKPOINT --tasks {','.join(TASKS)} --include-path {args.out}")
    return 0


def _texts(args: argparse.Namespace) -> Iterator[str]:
    prefix = args.input.removesuffix(".bin").removesuffix(".idx")
    if not idx_path(prefix).is_file():
        return read_documents(expand_inputs([args.input]), args.json_key)
    if args.tokenizer_model is None and args.tokenizer_type is None and (made_with := read_identity(prefix)):
        args.tokenizer_type, args.tokenizer_model = TokenizerType(made_with.type), made_with.model
    tokenizer = load_tokenizer(args)
    if tokenizer is None:
        raise ConfigError(f"{prefix} does not say which tokenizer made it; name it with --tokenizer-model")
    part = Split[args.part.upper()]
    return held_out_documents(prefix, tokenizer, args.split, part, args.split_by, args.seed)
