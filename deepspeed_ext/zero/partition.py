"""Which rank owns which element: pure functions from parameters and group sizes to buckets and shards.

Parameters that are updated alike (one optimizer parameter group, dense or one expert group, one dtype) lie one after
the other in one flat buffer. The buffer is cut into buckets, the units of communication and update, and each bucket
into one equal shard for each rank of the buffer's process group. Cuts fall anywhere, also inside a parameter, so only
the end of the buffer is padded. Nothing here touches tensors or processes: a layout for thousands of ranks costs no
more than a walk over the list of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

# Every parameter and every shard starts at a multiple of this many elements: 512 bytes in bf16, enough for vectorised
# and TMA loads, and the block length of 8-bit states, whose blocks then fall alike at every number of ranks.
ALIGNMENT = 256


@dataclass(frozen=True)
class TensorRange:
    """Elements [start, stop) of the flattened parameter ``name``, found at ``offset`` of a bucket or of a shard."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def where(self) -> slice:
        """The same elements in the bucket or shard."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class ShardRange:
    """``numel`` elements at ``offset`` of the shard that ``rank`` owns of bucket number ``bucket``."""

    rank: int
    bucket: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: ``group_size`` shards of ``shard_numel`` elements each, at ``start`` of the flat buffer.

    ``ranges`` says which parameters lie in it, in the order of their offsets.
    """

    start: int
    group_size: int
    shard_numel: int
    ranges: tuple[TensorRange, ...]

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.group_size * self.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Returns the [start, stop) of the bucket's elements that belong to no parameter."""
        gaps, end = [], 0
        for part in self.ranges:
            if part.offset > end:
                gaps.append((end, part.offset))
            end = part.offset + part.numel
        return gaps + ([(end, self.numel)] if end < self.numel else [])

    def shard_ranges(self, rank: int) -> tuple[TensorRange, ...]:
        """Returns what one rank of the group owns, with offsets in its shard; nothing if its shard is padding.

        Raises:
            ValueError: the rank is outside the group.
        """
        if not 0 <= rank < self.group_size:
            raise ValueError(f"rank={rank} is outside the group of {self.group_size} ranks")
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        owned = []
        for part in self.ranges:
            first = max(part.offset, low)
            last = min(part.offset + part.numel, high)
            if first < last:
                start = part.start + first - part.offset
                owned.append(TensorRange(part.name, start, start + last - first, first - low))
        return tuple(owned)


@dataclass(frozen=True)
class BufferLayout:
    """A flat buffer as consecutive buckets."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Length of the flat buffer, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return sum(bucket.shard_numel for bucket in self.buckets)

    @cached_property
    def ranges(self) -> dict[str, list[tuple[int, TensorRange]]]:
        """Where each parameter with elements lies: its ranges in order, each with the number of its bucket."""
        found: dict[str, list[tuple[int, TensorRange]]] = {}
        for index, bucket in enumerate(self.buckets):
            for part in bucket.ranges:
                found.setdefault(part.name, []).append((index, part))
        return found

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(part.numel for bucket in self.buckets for part in bucket.ranges)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flat_layout(params: Iterable[tuple[str, int]], group_size: int, bucket_numel: int) -> BufferLayout:
    """Lays parameters out one after the other in a flat buffer and cuts it into buckets.

    Buckets are of one length but for the last, a multiple of ``group_size * ALIGNMENT``. A parameter may lie in
    several.

    Args:
        params: (name, number of elements) of each parameter, in the order of the buffer.
        group_size: ranks of the process group, each of which owns one shard of each bucket.
        bucket_numel: the number of elements that a bucket should have at most; a shard has at least ``ALIGNMENT``.

    Raises:
        ValueError: a group without ranks, a bucket without elements, a negative size, or a name that occurs twice.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel={bucket_numel} must be at least 1")
    placed: list[tuple[str, int, int]] = []  # name, first element, one past the last
    seen: set[str] = set()
    end = 0
    for name, numel in params:
        if numel < 0:
            raise ValueError(f"parameter {name!r} has numel={numel}; it must not be negative")
        if name in seen:
            raise ValueError(f"parameter {name!r} occurs twice; each element needs exactly one owner")
        seen.add(name)
        placed.append((name, end, end + numel))
        end += _round_up(numel, ALIGNMENT)
    unit = group_size * ALIGNMENT
    total = max(unit, _round_up(end, unit))  # never empty, because backends differ on empty input
    length = _round_up(-(-total // -(-total // max(bucket_numel, unit))), unit)
    buckets: list[BucketLayout] = []
    first = 0  # of the parameters that reach into the bucket
    for start in range(0, total, length):
        stop = min(start + length, total)
        ranges = []
        while first < len(placed) and placed[first][2] <= start:
            first += 1
        for name, low, high in placed[first:]:
            if low >= stop:
                break
            if low < high:
                begin = max(low, start)
                ranges.append(TensorRange(name, begin - low, min(high, stop) - low, begin - start))
        buckets.append(BucketLayout(start, group_size, (stop - start) // group_size, tuple(ranges)))
    return BufferLayout(tuple(buckets))


def launch_order(buckets: Sequence[Sequence[int]]) -> list[int]:
    """Returns the indices of buckets in the order in which backward is expected to complete them.

    A bucket is complete when its first parameter in forward order has its gradient. The order is a pure function of the
    model, so all ranks launch alike.

    Args:
        buckets: for each bucket the positions of its parameters in forward order.
    """
    return sorted(range(len(buckets)), key=lambda index: (-min(buckets[index], default=0), index))
