"""Entries of an .idx file by small reads: where documents begin in a stretch of tokens, and whether entries are sound.

The index of a large file has hundreds of megabytes, so it is neither mapped nor read whole. Its entries ascend: the
first sequence of a stretch is found by interpolation, a page at a time (two to four pages as a rule, never more than
twice what bisection needs), the same for the documents of those sequences; then the entries of the stretch are read.

Before a run the entries of indices are compared with their neighbours (``check_indices``): all of them if a rank's
share is not too large, so that a damaged entry is found before the first step and not when a sample needs it. Of larger
ones all lengths are looked at, a fifth of the bytes at a tenth of the time; of still larger ones, as of their offsets
and bounds, evenly spread pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import HEADER_SIZE, Header, parse_header

_PAGE = 512  # entries of 8 bytes
_STRETCH = 1 << 16  # entries read together once the place is known
_LENGTHS = 1 << 16  # read together: what stays in a cache
_PIECES = 8  # of a file that is too large to be looked at whole

Entries = npt.NDArray[np.int64]
Read = Callable[[int, int], Entries]  # (first entry, number of them)


def document_starts(path: str, itemsize: int, start: int, stop: int) -> Entries:
    """First tokens, in [start, stop), of the documents of an .idx file that have any: int64, ascending.

    ``itemsize``: bytes of a token; ``stop``: at most the tokens of the file. Raises DataError if the file cannot be
    read, is no index, or a damaged one.
    """
    with _opened(path) as (header, _, offsets, bounds):
        first = _first_at_least(offsets, header.sequences, start * itemsize)
        inside = _read_below(offsets, first, header.sequences, stop * itemsize)  # of the stretch's sequences
        bound = _first_at_least(bounds, header.documents, first)
        numbers = _read_below(bounds, bound, header.documents, first + inside.size) - first
    falls = (inside[1:] < inside[:-1]).any() or (numbers[1:] < numbers[:-1]).any()  # differences could overflow
    if falls or (numbers.size and (numbers[0] < 0 or numbers[-1] >= inside.size)):
        raise DataError(f"{path}: offsets or document bounds do not ascend: the index is damaged, write it again")
    return np.unique(inside[numbers] // itemsize)  # a document without tokens begins where the next one does


def check_indices(paths: Sequence[str], itemsizes: Sequence[int], max_entries: int, max_lengths: int) -> None:
    """Looks at up to about ``max_entries`` sequences and documents of .idx files, and ``max_lengths`` lengths.

    Lengths must not be negative and add up to where the last sequence ends, a sequence must begin where the one before
    ends, documents must ascend and lie within the sequences. Raises DataError naming file and field. The ends are
    looked at by ``files.summarize_pair``.
    """
    counts = [_count(path) for path in paths]
    entries = shares(counts, max_entries, 512)
    for path, itemsize, count, own in zip(paths, itemsizes, counts, entries, strict=True):
        if own < count and sum(counts) <= max_lengths:
            _check_lengths(path, itemsize)
        _check_entries(path, itemsize, own)


def shares(counts: Sequence[int], budget: int, least: int) -> list[int]:
    """How many of each file's entries to look at: all if ``budget`` has room for that, else by size."""
    total = sum(counts)
    return [count if total <= budget else max(least, budget * count // total) for count in counts]


def _count(path: str) -> int:
    with _opened(path) as (header, _, _, _):
        return max(header.sequences, header.documents)


def _check_lengths(path: str, itemsize: int) -> None:
    with _opened(path) as (header, lengths, offsets, _):
        total = 0
        for first in range(0, header.sequences, _LENGTHS):
            sizes = lengths(first, min(_LENGTHS, header.sequences - first))
            _check_signs(path, first, sizes)
            total += int(sizes.sum(dtype=np.int64))
        last = header.sequences - 1
        end = int(offsets(last, 1)[0]) + int(lengths(last, 1)[0]) * itemsize if header.sequences else 0
    if total * itemsize != end:
        raise DataError(
            f"{path}: the lengths of its {header.sequences} sequences add up to {total * itemsize} bytes, the last of "
            f"them ends at byte {end}; the index is damaged, write it again"
        )


def _check_signs(path: str, first: int, sizes: npt.NDArray[np.integer]) -> None:
    if int(sizes.min()) < 0:
        bad = int(np.argmax(sizes < 0))
        raise DataError(f"{path}: sequence {first + bad} has the negative length {sizes[bad]}")


def _check_entries(path: str, itemsize: int, max_entries: int) -> None:
    with _opened(path) as (header, lengths, offsets, bounds):
        for first, count in spread_pieces(header.sequences, max_entries, _STRETCH):
            following = min(first + count + 1, header.sequences)
            sizes, begins = lengths(first, count).astype(np.int64), offsets(first, following - first)
            _check_signs(path, first, sizes)
            if first == 0 and begins[0] != 0:
                raise DataError(f"{path}: pointer of sequence 0 is {begins[0]}, expected 0")
            wrong = begins[1:] != begins[:-1] + sizes[: begins.size - 1] * itemsize
            if wrong.any():
                bad = int(np.argmax(wrong))
                raise DataError(
                    f"{path}: pointer of sequence {first + bad + 1} is {begins[bad + 1]}, but the one before begins at "
                    f"{begins[bad]} and has {sizes[bad]} tokens; the index is damaged, write it again"
                )
        for first, count in spread_pieces(header.documents, max_entries, _STRETCH):
            numbers = bounds(first, min(count + 1, header.documents - first))
            wrong = (numbers < 0) | (numbers > header.sequences)
            wrong[1:] |= numbers[1:] < numbers[:-1]
            if wrong.any():
                bad = int(np.argmax(wrong))
                before = f", after {numbers[bad - 1]}" if bad else ""
                raise DataError(
                    f"{path}: document bound {first + bad} is {numbers[bad]}{before}, of {header.sequences} sequences; "
                    "the index is damaged, write it again"
                )


def spread_pieces(total: int, budget: int, largest: int) -> list[tuple[int, int]]:
    """(start, count) of pieces of ``total`` entries to look at: of up to ``budget`` all, of more evenly spread ones."""
    if total <= budget:
        return [(start, min(largest, total - start)) for start in range(0, total, largest)]
    size = min(largest, budget // _PIECES)
    return [((total - size) * i // (_PIECES - 1), size) for i in range(_PIECES)]


@contextmanager
def _opened(path: str) -> Iterator[tuple[Header, Read, Read, Read]]:
    """Header of an .idx file, and readers of its lengths, offsets and document bounds. Raises DataError."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            header = parse_header(path, os.pread(descriptor, HEADER_SIZE, 0), os.fstat(descriptor).st_size)
            at = HEADER_SIZE + 4 * header.sequences
            lengths = _reader(descriptor, HEADER_SIZE, "<i4")
            yield header, lengths, _reader(descriptor, at), _reader(descriptor, at + 8 * header.sequences)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be read any more ({error.strerror}): restore it and resume") from error


def _reader(descriptor: int, position: int, dtype: str = "<i8") -> Read:
    width = np.dtype(dtype).itemsize

    def read(first: int, count: int) -> Entries:
        return np.frombuffer(os.pread(descriptor, width * count, position + width * first), dtype)

    return read


def _first_at_least(read: Read, count: int, target: int) -> int:
    """Number of the first of ``count`` ascending entries that is ``target`` or more; ``count`` if none is."""
    low, high = 0, count  # entries before low are below the target, those from high on are not
    low_value, high_value = 0, int(read(count - 1, 1)[0]) if count else 0
    by_value = True
    while low < high:
        share = (target - low_value) / (high_value - low_value) if by_value and high_value > low_value else 0.5
        guess = low + int((high - low) * min(1.0, max(0.0, share)))
        first = max(low, min(guess - _PAGE // 2, high - _PAGE))
        page = read(first, min(_PAGE, high - first))
        if page[-1] < target:
            low, low_value = first + page.size, int(page[-1])
        elif page[0] >= target:
            high, high_value = first, int(page[0])
        else:
            return first + int(np.searchsorted(page, target))
        by_value = not by_value
    return low


def _read_below(read: Read, first: int, count: int, limit: int) -> Entries:
    """Entries from ``first`` on, of ``count`` in all, up to the first that is ``limit`` or more."""
    found = []
    size = _PAGE
    while first < count:
        part = read(first, min(size, count - first))
        end = int(np.searchsorted(part, limit))
        found.append(part[:end])
        if end < part.size:
            break
        first, size = first + part.size, _STRETCH
    return np.concatenate(found) if found else np.empty(0, np.int64)
