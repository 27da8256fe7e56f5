"""Looks into token files: where documents lie, statistics, and documents that splits or files have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.config.schema import SplitBy
from megatron.optimus.data.dataset import Split, range_of_split
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.splits import NO_HASH_SPLITS


def document_offsets(data: IndexedDataset) -> npt.NDArray[np.int64]:
    """Returns the first token of each document, and at the end the number of tokens: int64 [documents + 1]."""
    ends = np.concatenate(([0], np.cumsum(data.sizes, dtype=np.int64)))
    return ends[data.document_index]


@dataclass
class Statistics:
    """Counts and lengths of the documents of one or more pairs."""

    documents: int = 0
    empty: int = 0  # documents without tokens
    tokens: int = 0
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)  # tokens of each document, by pair

    def add(self, data: IndexedDataset) -> None:
        """Adds the documents of a pair."""
        lengths = np.diff(document_offsets(data))
        self.documents += lengths.size
        self.empty += int((lengths == 0).sum())
        self.tokens += data.tokens_total
        self.lengths.append(lengths)

    def quantiles(self) -> dict[str, int]:
        """Returns quantiles of the tokens in a document, by name; empty without documents."""
        lengths = np.concatenate(self.lengths) if self.lengths else np.empty(0, np.int64)
        if not lengths.size:
            return {}
        names = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1}
        return {name: int(np.quantile(lengths, q)) for name, q in names.items()}

    def save_histogram(self, path: Path, title: str) -> None:
        """Draws the documents' lengths, and the share of tokens that each length holds, as a PNG. Needs matplotlib."""
        from matplotlib.figure import Figure

        lengths = np.concatenate(self.lengths)
        lengths = lengths[lengths > 0]
        bins = np.geomspace(1, max(2, int(lengths.max(initial=1)) + 1), 50).tolist()
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.hist(
            lengths, bins, weights=np.full(lengths.size, 100 / max(1, lengths.size)), alpha=0.6, label="documents"
        )
        axes.hist(lengths, bins, weights=100 * lengths / max(1, lengths.sum()), histtype="step", lw=2, label="tokens")
        axes.set(xscale="log", xlabel="tokens in a document", ylabel="share in %", title=title)
        axes.legend()
        figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Duplicate:
    """Two documents with the same tokens."""

    first: tuple[str, int]  # (prefix, document)
    second: tuple[str, int]
    splits: tuple[str, str]  # names of the splits that own tokens of each


def find_duplicates(
    prefixes: Sequence[str], split: str, *, split_by: SplitBy = SplitBy.POSITION, across_splits: bool = True
) -> Iterator[Duplicate]:
    """Finds documents whose tokens occur a second time.

    Compares 128-bit hashes, which take about 40 bytes of memory a document. A document belongs to every split that owns
    some of its tokens, and is compared whole.

    Args:
        prefixes: paths of the pairs, without suffix
        split: shares of training, validation and test
        split_by: HASH, POSITION, or AUTO for HASH where all pairs are prepared for it
        across_splits: True: only documents that belong to different splits count; False: all
    """
    seen: dict[int, tuple[str, int, tuple[str, ...]]] = {}
    files = TokenFiles(prefixes, split=split)
    split_by = split_of_files(files, split_by)
    for number_of_file, prefix in enumerate(files.prefixes):
        data = IndexedDataset(prefix)
        offsets = document_offsets(data)
        bounds = (range_of_split(files, number_of_file, split, part, split_by) for part in Split)
        ranges = [(part.name.lower(), *own) for part, own in zip(Split, bounds, strict=True)]
        for number in range(offsets.size - 1):
            start, stop = int(offsets[number]), int(offsets[number + 1])
            if start == stop:
                continue
            # as 64-bit numbers, so that pairs of different element types compare
            key = xxhash.xxh3_128_intdigest(data.tokens[start:stop].astype(np.int64).tobytes())
            own = tuple(name for name, first, last in ranges if first < stop and start < last)
            if key not in seen:
                seen[key] = prefix, number, own
                continue
            before, other, theirs = seen[key]
            if not across_splits or set(own) != set(theirs):
                yield Duplicate((before, other), (prefix, number), ("+".join(theirs), "+".join(own)))


def split_of_files(files: TokenFiles, split_by: SplitBy) -> SplitBy:
    """Returns what AUTO means for files alone, HASH where all are prepared for it; a run also asks its checkpoint."""
    if split_by is not SplitBy.AUTO:
        return split_by
    return SplitBy.POSITION if NO_HASH_SPLITS in files.splits else SplitBy.HASH


def document_at(data: IndexedDataset, token: int) -> tuple[int, int]:
    """Finds the document that holds a token: (number of the document, its first token)."""
    offsets = document_offsets(data)
    number = int(np.searchsorted(offsets, token, side="right")) - 1
    return number, int(offsets[number])
