"""Packing: whole documents put together so that few of them are cut.

Plain instances cut a stream of documents every L tokens, nearly every time inside one. Packed ones are made from
windows of ``WINDOW - 1`` times L tokens of a file, whose documents are laid into ``WINDOW`` sequences by best fit: the
longest first, each into the fullest sequence that still has room for it (Ding et al. 2024, arXiv 2404.10830). Cut are
only documents longer than L, those at the ends of a window, and, rarely, one that fits nowhere any more; it fills the
holes that are left. One sequence in ``WINDOW`` is room to spare: padding, 1.6 % of all positions.

How many sequences a file gives so depends on its size alone. So the order of samples needs nothing else either, starts
as fast as without packing, and the packing of a window is worked out when a sample of it is read: a fraction of a
millisecond, and a few pages of the index. What it does cost are reads: the documents of a sample lie apart in a window
of half a million tokens, so a sample is several reads of as many pages.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

WINDOW = 64  # sequences packed together; more would cut hardly fewer documents

Range = tuple[int, int]  # tokens [start, stop)


def num_packed(instances: int) -> int:
    """Sequences that ``instances`` * L tokens of a file become; a last, shorter window has no room to spare."""
    windows, rest = divmod(instances, WINDOW - 1)
    return windows * WINDOW + rest


def window_of(packed: int, instances: int) -> tuple[int, int, int, int]:
    """Of a packed sequence of a file: (first instance of its window, instances and sequences there, its number)."""
    window, inside = divmod(packed, WINDOW)
    first = window * (WINDOW - 1)
    rest = instances - first
    return (first, WINDOW - 1, WINDOW, inside) if rest >= WINDOW - 1 else (first, rest, rest, inside)


def pack(bounds: Sequence[int], sequences: int, length: int) -> list[list[Range]]:
    """Lays the documents between ``bounds`` into sequences of ``length`` tokens; their ranges, ascending, in each.

    ``bounds`` ascend, from the window's first token to its end: at most ``sequences`` * ``length`` tokens.
    """
    pieces: list[tuple[int, int]] = []  # (tokens, first token)
    for start, stop in itertools.pairwise(bounds):
        whole = (stop - start) // length
        pieces += [(length, start + i * length) for i in range(whole)]
        if start + whole * length < stop:
            pieces.append((stop - start - whole * length, start + whole * length))
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    free = [length * sequences + i for i in range(sequences)]  # room * sequences + sequence, ascending
    packed: list[list[Range]] = [[] for _ in range(sequences)]

    def put(place: int, size: int, start: int) -> None:
        room, sequence = divmod(free.pop(place), sequences)
        packed[sequence].append((start, start + size))
        if room > size:
            bisect.insort(free, (room - size) * sequences + sequence)

    left = []
    for size, start in pieces:
        place = bisect.bisect_left(free, size * sequences)
        if place < len(free):
            put(place, size, start)
        else:
            left.append((size, start))
    for size, start in left:  # into the largest holes, cut
        while size:
            part = min(size, free[-1] // sequences)
            put(len(free) - 1, part, start)
            size, start = size - part, start + part  # noqa: PLW2901
    return [sorted(ranges) for ranges in packed]
