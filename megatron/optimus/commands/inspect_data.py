"""Inspect token files, or the samples that a run reads from them.

    optimus inspect-data stats data/corpus_text_document --histogram lengths.png
    optimus inspect-data show data/corpus_text_document --documents 0 5 --tokenizer-model tokenizer/
    optimus inspect-data check data/*.idx --vocab-size 50304
    optimus inspect-data duplicates data/a data/b --split 969,30,1
    optimus inspect-data sample 123456 --data-file-list blend.yaml --seq-length 4096 --seed 1234 ...
    optimus inspect-data blend --data-file-list blend.yaml --seq-length 4096 --samples 1000000 --picture b.png

Exit code: 0, 1 where duplicates were found, or 2 after one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.optimus.config.load import Parser, whole_number
from megatron.optimus.config.schema import ConfigError, DataConfig, Packing, SplitBy, TokenizerType
from megatron.optimus.config.tokenizer_files import settle_tokenizer_type
from megatron.optimus.data.dataset import InstanceSet, Split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.inspection import (
    Statistics,
    document_at,
    document_offsets,
    find_duplicates,
    split_of_files,
)
from megatron.optimus.data.mixture import Mixture
from megatron.optimus.data.order import sample_at
from megatron.optimus.data.sources import read_sources
from megatron.optimus.data.tokenize.tokenizer import Tokenizer, build_tokenizer
from megatron.optimus.platform.log import counted, printable, prints_errors

_FEWEST_SAMPLES = 20  # of a bin of the picture, as far as the run has them


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("inspect-data", __doc__ or "", usage="optimus inspect-data ACTION [options]")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", prog="optimus inspect-data")
    files = Parser(add_help=False)
    files.add_argument("prefixes", nargs="+", help="prefixes of .bin/.idx pairs, with or without .bin or .idx")
    text = Parser(add_help=False)
    text.add_enum("--tokenizer-type", members=TokenizerType, help="type of the tokenizer; default: as its file says")
    text.add_argument("--tokenizer-model", help="file or folder of the tokenizer; default: show token ids")
    splits = Parser(add_help=False)
    splits.add_argument("--split", default="969,30,1", help="as in training; default: 969,30,1")
    by = "as in config.yaml of the run; default: hash where all files are prepared for it, else position"
    splits.add_enum("--split-by", members=SplitBy, default=SplitBy.AUTO, help=by)
    data = Parser(add_help=False, parents=[splits])
    data.add_argument("--data-path", nargs="+", default=[], help="as in training")
    data.add_argument("--data-file-list", help="as in training")
    data.add_argument("--seq-length", type=int, required=True, help="as in training")
    data.add_argument("--seed", type=int, default=1234, help="as in training; default: 1234")

    stats = actions.add_parser("stats", parents=[files], help="count documents and tokens")
    stats.add_argument("--histogram", help="PNG of document lengths to write")
    show = actions.add_parser("show", parents=[files, text], help="print documents as text")
    show.add_argument(
        "--documents", nargs="+", type=int, default=[0], help="numbers of documents, from 0; negative: from the end"
    )
    check = actions.add_parser("check", parents=[files], help="check every entry of the index files and every token id")
    check.add_argument("--vocab-size", type=whole_number(), help="token ids must be below it")
    same = actions.add_parser("duplicates", parents=[files, splits], help="find documents that are in two splits")
    same.add_argument("--anywhere", action="store_true", help="also find duplicates within a split")
    sample = actions.add_parser("sample", parents=[data, text], help="print a sample of a run")
    sample.add_argument("position", type=whole_number(0), help="number of the sample, from 0")
    sample.add_enum("--packing", members=Packing, default=Packing.NONE, help="as in training")
    blend = actions.add_parser("blend", parents=[data], help="print the samples and epochs of each corpus in a run")
    blend.add_argument("--samples", type=whole_number(), required=True, help="samples of the run")
    blend.add_argument("--picture", help="PNG of the proportions of two or more corpora, to write")
    return parser.parse(argv)


def load_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """Returns the tokenizer of the command line, or None."""
    if args.tokenizer_model is None and args.tokenizer_type is not TokenizerType.BYTE:
        return None
    kind, guess = settle_tokenizer_type(args.tokenizer_type, args.tokenizer_model)
    if guess:
        print(guess, file=sys.stderr)
    return build_tokenizer(kind, args.tokenizer_model)


def tokens_to_text(tokenizer: Tokenizer | None, ids: np.ndarray) -> str:
    """Returns the tokens as text, or their ids without a tokenizer; adds a line where ids are not the tokenizer's."""
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    unknown = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    text = printable(tokenizer.decode(ids.tolist()))
    if unknown.size:
        text += (
            f"\n[{unknown.size} of {ids.size} ids, such as {unknown[0]}, are not among the tokenizer's "
            f"{tokenizer.vocab_size}: the file is of another tokenizer]"
        )
    return text


def print_stats(args: argparse.Namespace) -> None:
    """Prints the number and lengths of documents of each pair and of all (action ``stats``)."""
    total = Statistics()
    for prefix in args.prefixes:
        one = Statistics()
        data = IndexedDataset(prefix)
        one.add(data)
        total.add(data)
        counts = f"{one.documents} documents ({one.empty} empty), {one.tokens} tokens"
        print(printable(f"{prefix}: {counts}, {data.dtype.name}"))
    print(f"all: {total.documents} documents ({total.empty} empty), {total.tokens} tokens")
    print("tokens in a document: " + ", ".join(f"{name} {value}" for name, value in total.quantiles().items()))
    if args.histogram:
        total.save_histogram(Path(args.histogram), f"{total.documents} documents, {total.tokens} tokens")


def print_documents(args: argparse.Namespace) -> None:
    """Prints documents by their number, as text or token ids (action ``show``)."""
    tokenizer = load_tokenizer(args)
    for prefix in args.prefixes:
        data = IndexedDataset(prefix)
        bounds = document_offsets(data)
        count = bounds.size - 1
        for number in args.documents:
            if not -count <= number < count:
                raise DataError(f"{prefix}: document {number} of {count}")
            start, stop = bounds[number % count], bounds[number % count + 1]
            print(printable(f"--- {prefix} document {number % count}: {stop - start} tokens from {start}"))
            print(tokens_to_text(tokenizer, data.tokens[start:stop]))


def check_files(args: argparse.Namespace) -> None:
    """Checks index and token ids of each pair (action ``check``). Raises DataError for the first bad one."""
    for prefix in args.prefixes:
        data = IndexedDataset(prefix)
        if args.vocab_size is not None:
            data.check_token_ids(args.vocab_size)
        print(f"{prefix}: ok, {data.document_index.size - 1} documents, {data.tokens_total} tokens, {data.dtype.name}")


def print_duplicates(args: argparse.Namespace) -> int:
    """Prints pairs of documents with the same tokens (action ``duplicates``); returns 1 if there are any."""
    count = 0
    for found in find_duplicates(args.prefixes, args.split, split_by=args.split_by, across_splits=not args.anywhere):
        count += 1
        (a, i), (b, j) = found.first, found.second
        print(f"{a} document {i} ({found.splits[0]}) = {b} document {j} ({found.splits[1]})")
    print(f"{count} duplicates")
    return 1 if count else 0


def open_training_data(args: argparse.Namespace) -> Mixture | InstanceSet:
    """Returns the training data of the command line: a blend, or one corpus."""
    sources = read_sources(DataConfig(data_path=args.data_path, data_file_list=args.data_file_list))
    files = TokenFiles(sources.prefixes, split=args.split)
    split_by = split_of_files(files, args.split_by)
    options: dict[str, Any] = {"split": args.split, "split_by": split_by, "files": files}
    if "packing" in args:
        options["packing"] = args.packing is Packing.BEST_FIT
    if sources.is_blend:
        return Mixture(sources, args.seq_length, part=Split.TRAIN, seed=args.seed, **options)
    return InstanceSet(sources.prefixes, args.seq_length, **options)


def print_sample(args: argparse.Namespace) -> None:
    """Prints where a sample of a run comes from, and its tokens (action ``sample``)."""
    data, tokenizer = open_training_data(args), load_tokenizer(args)
    if isinstance(data, Mixture):
        corpus, epoch, instance, prefix, ranges = data.sample(args.position)
    else:
        epoch, instance = sample_at(args.position, len(data), args.seed)
        corpus, (prefix, ranges) = "all", data.locate(instance)
    print(f"sample {args.position}: corpus {corpus}, epoch {epoch}, instance {instance}, of {prefix}.bin")
    file = IndexedDataset(prefix)
    for start, stop in ranges:
        document, first = document_at(file, start)
        print(f"--- tokens [{start}, {stop}), from token {start - first} of document {document}")
        print(tokens_to_text(tokenizer, file.tokens[start:stop]))


def print_blend(args: argparse.Namespace) -> None:
    """Prints what a run reads of each corpus (action ``blend``)."""
    data = open_training_data(args)
    if not isinstance(data, Mixture):
        if args.picture:
            raise DataError("--picture plots the proportions of two or more corpora; this data is one corpus")
        print(f"all: {len(data)} instances, {args.samples / len(data):.4f} epochs")
        return
    for plan in data.plan(args.samples):
        print(
            f"{plan.name}: {counted(plan.files, 'file')}, {plan.tokens} tokens, {plan.samples} samples "
            f"({100 * plan.samples / args.samples:.4f} %), {plan.epochs:.4f} epochs"
        )
    if args.picture:
        plot_shares(data, args.samples, Path(args.picture))


def plot_shares(data: Mixture, samples: int, path: Path) -> None:
    """Plots, over the run, the proportion of each corpus (left) and its distance from the target in samples (right)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    width = max(samples // 100, min(samples, _FEWEST_SAMPLES))
    firsts = [first for first in data.stage_starts if first < samples]
    positions = np.array(sorted({*range(0, samples, width), *firsts, samples}))  # no bin spans two stages
    counts = np.array([data.counts(position) for position in positions.tolist()])
    proportions = 100 * np.diff(counts, axis=0) / np.diff(positions)[:, None]
    distances = np.array([_largest_distance(data, position, samples) for position in positions[:-1].tolist()])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    left.stackplot(positions, np.concatenate([proportions, proportions[-1:]]).T, step="post", labels=data.names)
    left.set(xlabel="samples", ylabel="samples of the corpus in %", title="proportions")
    left.set(xlim=(0, samples), ylim=(0, 100))
    right.plot(positions[:-1], distances, lw=0.8, marker=".", ms=4)
    limit = 1.1 * max(1.0, float(np.abs(distances).max()))
    right.set(xlabel="samples", ylabel="samples ahead of the target", title="largest distance from the target")
    right.set(xlim=(0, samples), ylim=(-limit, limit))
    for first in firsts[1:]:
        left.axvline(first, color="black", lw=0.8, ls="--")
        right.axvline(first, color="black", lw=0.8, ls="--")
    figure.legend(loc="outside upper center", ncols=min(6, len(data.names)), fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _largest_distance(data: Mixture, position: int, samples: int) -> np.ndarray:
    """The largest distance of each corpus from its target over the next few samples, with its sign: [corpora]."""
    count = min(_FEWEST_SAMPLES, samples - position)
    drawn = data.corpora_at(position, count)[:, None] == np.arange(len(data.names))
    distances = data.counts(position) + np.cumsum(drawn, axis=0) - data.targets(position + 1 + np.arange(count))
    return np.take_along_axis(distances, np.abs(distances).argmax(axis=0)[None], axis=0)[0]


@prints_errors(DataError, ConfigError, IndexError)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``optimus inspect-data``; returns the exit code."""
    actions = {
        "stats": print_stats,
        "show": print_documents,
        "check": check_files,
        "duplicates": print_duplicates,
        "sample": print_sample,
        "blend": print_blend,
    }
    args = _parse(argv)
    if "prefixes" in args:
        args.prefixes = list(dict.fromkeys(p.removesuffix(".bin").removesuffix(".idx") for p in args.prefixes))
    try:
        return actions[args.action](args) or 0
    except OSError as error:  # of a plot or a closed pipe; errors of data files are DataErrors
        raise ConfigError(f"{error.filename or 'the output'}: cannot be written: {error.strerror}") from error
