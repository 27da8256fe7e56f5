"""Where documents begin in a stretch of a token file, found in its index by a few small reads.

The index of a large file has hundreds of megabytes, so it is neither mapped nor read whole. Its entries ascend: the
first sequence of a stretch is found by interpolation, a page at a time (two to four pages as a rule, never more than
twice what bisection needs), the same for the documents of those sequences; then the entries of the stretch are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import HEADER_SIZE, parse_header

_PAGE = 512  # entries of 8 bytes
_STRETCH = 1 << 16  # entries read together once the place is known

Entries = npt.NDArray[np.int64]
Read = Callable[[int, int], Entries]  # (first entry, number of them)


def document_starts(path: str, itemsize: int, start: int, stop: int) -> Entries:
    """First tokens, in [start, stop), of the documents of an .idx file that have any: int64, ascending.

    ``itemsize``: bytes of a token; ``stop``: at most the tokens of the file. Raises DataError if the file cannot be
    read, is no index, or a damaged one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            header = parse_header(path, os.pread(descriptor, HEADER_SIZE, 0), os.fstat(descriptor).st_size)
            at = HEADER_SIZE + 4 * header.sequences
            offsets, bounds = _reader(descriptor, at), _reader(descriptor, at + 8 * header.sequences)
            first = _first_at_least(offsets, header.sequences, start * itemsize)
            inside = _read_below(offsets, first, header.sequences, stop * itemsize)  # of the stretch's sequences
            bound = _first_at_least(bounds, header.documents, first)
            numbers = _read_below(bounds, bound, header.documents, first + inside.size) - first
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be read any more ({error.strerror}): restore it and resume") from error
    if (np.diff(inside) < 0).any() or (np.diff(numbers) < 0).any() or (numbers.size and numbers[0] < 0):
        raise DataError(f"{path}: offsets or document bounds do not ascend: the index is damaged, write it again")
    return np.unique(inside[numbers] // itemsize)  # a document without tokens begins where the next one does


def _reader(descriptor: int, position: int) -> Read:
    def read(first: int, count: int) -> Entries:
        return np.frombuffer(os.pread(descriptor, 8 * count, position + 8 * first), "<i8")

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
