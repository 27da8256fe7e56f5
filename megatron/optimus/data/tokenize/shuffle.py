"""Shuffles the documents of a corpus of any size on disk, in an order that depends on seed and texts alone.

Each document has a hash of its text, keyed by the seed. It decides the document's bucket (splits.py); inside a bucket
the order is that of a second random number, made of the hash and of how many equal documents came before, so that equal
documents do not stand side by side. The order is a random permutation of the documents, and depends neither on the
order of the input, nor on parts, processes or workers.

It is an external sort in two passes. Documents are collected up to ``RUN_BYTES``, sorted by hash, and written as a run:
a file of hashes, and for each text of a document one of tokens and one of where each document's tokens begin. Then the
runs are merged bucket after bucket, with ``BATCH_BYTES`` of tokens in memory at a time.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.order import mix_many
from megatron.optimus.data.splits import NUM_BUCKETS, bucket_of, first_hashes

RUN_BYTES = 1 << 28  # tokens collected before they are sorted and written
BATCH_BYTES = 1 << 28  # tokens merged together
_GOLDEN = 0x9E3779B97F4A7C15

Hashes = npt.NDArray[np.uint64]


def text_hashes(texts: Sequence[str], seed: int) -> Hashes:
    """Returns the hash of each text under a seed: uint64, the same on every machine."""
    return np.array([xxhash.xxh3_64_intdigest(text.encode(), seed) for text in texts], dtype=np.uint64)


class RunWriter:
    """Writes documents as sorted runs into a folder, which is emptied first.

    Args:
        folder: of the runs of one partition
        num_texts: texts of each document, which become a pair each
        dtype: element type of the tokens

    Raises:
        DataError: the disk refuses.
    """

    def __init__(self, folder: Path, num_texts: int, dtype: np.dtype[Any]) -> None:
        self._folder, self._num_texts, self._dtype = folder, num_texts, dtype
        self.num_runs = 0
        self._clear()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot write: {error.strerror}") from error

    def add(self, hashes: Hashes, tokens: Sequence[npt.NDArray[Any]], lengths: Sequence[Sequence[int]]) -> None:
        """Appends documents.

        Args:
            hashes: of each document
            tokens: for each text, the tokens of all documents back to back
            lengths: for each text, the tokens of each document
        """
        self._hashes.append(hashes)
        for i in range(self._num_texts):
            self._tokens[i].append(tokens[i])
            self._lengths[i].append(np.asarray(lengths[i], dtype=np.int64))
            self._held += tokens[i].nbytes
        if self._held >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected as a run. Raises DataError."""
        if not self._hashes:
            return
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")
        try:
            _write(self._folder / f"{self.num_runs}.hashes", hashes[order])
            for text, (tokens, lengths) in enumerate(zip(self._tokens, self._lengths, strict=True)):
                joined, sizes = np.concatenate(tokens), np.concatenate(lengths)
                starts = _starts(sizes)
                _write(self._folder / f"{self.num_runs}.{text}.starts", _starts(sizes[order]))
                _write(self._folder / f"{self.num_runs}.{text}.tokens", _gather(joined, starts, order))
        except OSError as error:
            raise DataError(f"{self._folder}: cannot write: {error.strerror}") from error
        self.num_runs += 1
        self._clear()

    def _clear(self) -> None:
        self._hashes: list[Hashes] = []
        self._tokens: list[list[npt.NDArray[Any]]] = [[] for _ in range(self._num_texts)]
        self._lengths: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(self._num_texts)]
        self._held = 0  # bytes of tokens


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def _gather(tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The tokens of documents in another order, back to back."""
    firsts, lasts = starts[order].tolist(), starts[order + 1].tolist()
    found = [tokens[first:last] for first, last in zip(firsts, lasts, strict=True)]
    return np.concatenate(found) if found else tokens[:0]


def _write(path: Path, values: npt.NDArray[Any]) -> None:
    with open(path, "wb") as stream:
        stream.write(np.ascontiguousarray(values).data)
        stream.flush()
        os.fsync(stream.fileno())


class _SortedRun(NamedTuple):
    """A run, and where the buckets begin in it."""

    base: str  # path without suffix
    cuts: npt.NDArray[np.int64]  # [NUM_BUCKETS + 1], documents before each bucket


def merge_runs(
    folders: Sequence[Path],
    num_runs: Sequence[int],
    text: int,
    writer: IndexedDatasetWriter,
    show_progress: Callable[[float], None] = lambda fraction: None,
) -> npt.NDArray[np.int64]:
    """Merges runs into a pair.

    Args:
        folders: of the partitions, in the order of the input
        num_runs: runs in each
        text: which of each document's texts
        writer: of the pair
        show_progress: called with the fraction that has been merged

    Returns:
        First token of each bucket, and at the end the number of tokens: int64 [NUM_BUCKETS + 1].

    Raises:
        DataError: a run is missing or damaged, or the disk refuses.
    """
    edges = first_hashes()
    runs, sizes = [], np.zeros(NUM_BUCKETS, dtype=np.int64)
    try:
        for base in (f"{folder}/{i}" for folder, count in zip(folders, num_runs, strict=True) for i in range(count)):
            hashes, starts = _map(f"{base}.hashes", np.uint64), _map(f"{base}.{text}.starts", np.int64)
            cuts = np.concatenate(([0], np.searchsorted(hashes, edges), [hashes.size])).astype(np.int64)
            sizes += np.diff(starts[cuts])
            runs.append(_SortedRun(base, cuts))
        bucket_starts, first = _starts(sizes), 0
        while first < NUM_BUCKETS:  # as many buckets together as fit, one at least
            limit = bucket_starts[first] + BATCH_BYTES // writer.dtype.itemsize
            last = max(first + 1, int(np.searchsorted(bucket_starts, limit, side="right")) - 1)
            _merge_buckets(runs, first, last, text, writer)
            show_progress(bucket_starts[last] / max(1, bucket_starts[-1]))
            first = last
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{folders[0].parent}: a part cannot be read: {error}; remove it and start again") from error
    return bucket_starts


def _map(path: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A file mapped into memory, for it is read in small places; an empty one cannot be mapped."""
    return np.memmap(path, dtype, mode="r") if os.path.getsize(path) else np.empty(0, dtype)


def _merge_buckets(runs: Sequence[_SortedRun], first: int, last: int, text: int, writer: IndexedDatasetWriter) -> None:
    """Appends the documents of buckets [first, last)."""
    hashes, firsts, sizes, sources = [], [], [], []
    for number, (base, cuts) in enumerate(runs):
        start, stop = int(cuts[first]), int(cuts[last])
        if start == stop:
            continue
        hashes.append(np.array(_map(f"{base}.hashes", np.uint64)[start:stop]))
        bounds = np.array(_map(f"{base}.{text}.starts", np.int64)[start : stop + 1])
        firsts.append(bounds[:-1])
        sizes.append(np.diff(bounds))
        sources.append(np.full(stop - start, number, dtype=np.int32))
    if not hashes:
        return
    order = shuffled(np.concatenate(hashes))
    first_tokens, lengths, source = (np.concatenate(each)[order] for each in (firsts, sizes, sources))
    limit = BATCH_BYTES // writer.dtype.itemsize
    block = np.cumsum(lengths) // limit  # one bucket may have more than fits into memory
    ends = [*(np.flatnonzero(np.diff(block)) + 1).tolist(), lengths.size]
    for start, stop in itertools.pairwise([0, *ends]):
        own = slice(start, stop)
        tokens = np.empty(int(lengths[own].sum()), dtype=writer.dtype)
        targets = _starts(lengths[own])
        for number in np.unique(source[own]).tolist():
            stored = _map(f"{runs[number].base}.{text}.tokens", writer.dtype)
            where = np.flatnonzero(source[own] == number)
            places = targets[where], first_tokens[own][where], lengths[own][where]
            for target, begin, size in zip(*(place.tolist() for place in places), strict=True):
                tokens[target : target + size] = stored[begin : begin + size]
        writer.add_documents(tokens, lengths[own].tolist())


def shuffled(hashes: Hashes) -> npt.NDArray[np.int64]:
    """Returns the order of documents: bucket after bucket, at random inside each.

    Args:
        hashes: of all documents of some buckets; equal ones in the order of the input

    Returns:
        Indices of ``hashes``, int64.
    """
    by_hash = np.argsort(hashes, kind="stable")
    ascending = hashes[by_hash]
    is_new = np.concatenate(([True], ascending[1:] != ascending[:-1]))
    groups = np.flatnonzero(is_new)
    repeats = np.empty(hashes.size, dtype=np.uint64)  # equal documents before each
    repeats[by_hash] = np.arange(hashes.size) - np.repeat(groups, np.diff(np.append(groups, hashes.size)))
    return np.lexsort((mix_many(hashes + repeats * np.uint64(_GOLDEN)), bucket_of(hashes)))
