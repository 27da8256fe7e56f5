"""Looking into token files: documents as text, statistics, and documents that splits or files have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.data.dataset import Split, split_range
from megatron.optimus.data.indexed import IndexedDataset


def document_bounds(data: IndexedDataset) -> npt.NDArray[np.int64]:
    """First token of each document, and the number of tokens: int64 [documents + 1]."""
    ends = np.concatenate(([0], np.cumsum(data.sizes, dtype=np.int64)))
    return ends[data.document_index]


@dataclass
class Statistics:
    """Of one or more pairs."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def add(self, data: IndexedDataset) -> None:
        lengths = np.diff(document_bounds(data))
        self.documents += lengths.size
        self.empty += int((lengths == 0).sum())
        self.tokens += data.tokens_total
        self.lengths.append(lengths)

    def quantiles(self) -> dict[str, int]:
        lengths = np.concatenate(self.lengths) if self.lengths else np.empty(0, np.int64)
        if not lengths.size:
            return {}
        names = {"min": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1}
        return {name: int(np.quantile(lengths, q)) for name, q in names.items()}

    def save_histogram(self, path: Path, title: str) -> None:
        """A picture of the documents' lengths, and of the share of tokens that each length holds. Needs matplotlib."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        lengths = np.concatenate(self.lengths)
        lengths = lengths[lengths > 0]
        bins = np.geomspace(1, max(2, int(lengths.max(initial=1)) + 1), 50).tolist()
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        axes.hist(
            lengths, bins, weights=np.full(lengths.size, 100 / max(1, lengths.size)), alpha=0.6, label="documents"
        )
        axes.hist(lengths, bins, weights=100 * lengths / max(1, lengths.sum()), histtype="step", lw=2, label="tokens")
        axes.set(xscale="log", xlabel="tokens in a document", ylabel="share in %", title=title)
        axes.legend()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


@dataclass(frozen=True)
class Duplicate:
    """Two documents with the same tokens."""

    first: tuple[str, int]  # (prefix, document)
    second: tuple[str, int]
    splits: tuple[str, str]


def find_duplicates(prefixes: Sequence[str], split: str, *, across_splits: bool = True) -> Iterator[Duplicate]:
    """Documents whose tokens occur in another split too (or, without ``across_splits``, anywhere else).

    A document belongs to every split that owns some of its tokens. Compares 128-bit hashes, 40 bytes or so of memory a
    document; a cut document is compared whole.
    """
    seen: dict[int, tuple[str, int, tuple[str, ...]]] = {}
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        bounds = document_bounds(data)
        ranges = [(part.name.lower(), *split_range(data.tokens_total, split, part)) for part in Split]
        for number in range(bounds.size - 1):
            start, stop = int(bounds[number]), int(bounds[number + 1])
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


def document_at(data: IndexedDataset, token: int) -> tuple[int, int]:
    """(document that holds a token, its first token)."""
    bounds = document_bounds(data)
    number = int(np.searchsorted(bounds, token, side="right")) - 1
    return number, int(bounds[number])
