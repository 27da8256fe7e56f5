"""Who owns which element: pure functions from parameters and group sizes to buckets and shards.

Parameters that are updated alike form a family (one optimizer parameter group, dense or one expert group, one dtype).
A family is laid out in one flat buffer, and the buffer is cut into buckets, the units of communication and update.
Each bucket is cut into one equal shard per rank of the family's process group. ``flat_layout`` lays parameter after
parameter and cuts anywhere, so only the family's end is padded; a layout for whole matrices has the same form with more
pieces. Nothing here touches tensors or processes, so a layout for thousands of ranks costs no more than a walk over the
parameter list.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

FamilyT = TypeVar("FamilyT", bound=Hashable)

# Every parameter and every shard starts at a multiple of this many elements: 512 bytes in bf16, enough for vectorised
# and TMA loads, and the block length of 8-bit states, whose blocks then fall alike at every number of ranks.
ALIGNMENT = 256


@dataclass(frozen=True)
class ParamSpec(Generic[FamilyT]):
    """A parameter as the partitioner sees it: its name, its local element count, and the family it belongs to."""

    name: str
    numel: int
    family: FamilyT


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, found at ``offset`` of a bucket or of a shard."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """``group_size`` shards of ``shard_numel`` elements, at ``start`` of the family's buffer; pieces in order."""

    start: int
    group_size: int
    shard_numel: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.group_size * self.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the bucket that belong to no parameter."""
        gaps, end = [], 0
        for piece in self.pieces:
            if piece.offset > end:
                gaps.append((end, piece.offset))
            end = piece.offset + piece.stop - piece.start
        return gaps + ([(end, self.numel)] if end < self.numel else [])

    def shard_pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` of the group owns, offsets counted in its shard; empty if that is padding.

        Raises ValueError for a rank outside the group.
        """
        if not 0 <= rank < self.group_size:
            raise ValueError(f"rank={rank} is outside the group of {self.group_size} ranks")
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        owned = []
        for piece in self.pieces:
            first = max(piece.offset, low)
            last = min(piece.offset + piece.stop - piece.start, high)
            if first < last:
                start = piece.start + first - piece.offset
                owned.append(Piece(piece.name, start, start + last - first, first - low))
        return tuple(owned)


@dataclass(frozen=True)
class FamilyLayout:
    """One family's flat buffer as consecutive buckets."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Length of the flat buffer, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return sum(bucket.shard_numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(piece.stop - piece.start for bucket in self.buckets for piece in bucket.pieces)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def flat_layout(params: Iterable[tuple[str, int]], group_size: int, bucket_numel: int) -> FamilyLayout:
    """Lays (name, numel) pairs out in the given order, in buckets of about ``bucket_numel`` elements or fewer.

    Buckets are of one length but for the last, a multiple of ``group_size * ALIGNMENT``; a parameter may lie in
    several. Raises ValueError for a group without ranks, a bucket without elements, a negative size, or a name that
    occurs twice.
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
        pieces = []
        while first < len(placed) and placed[first][2] <= start:
            first += 1
        for name, low, high in placed[first:]:
            if low >= stop:
                break
            if low < high:
                begin = max(low, start)
                pieces.append(Piece(name, begin - low, min(high, stop) - low, begin - start))
        buckets.append(BucketLayout(start, group_size, (stop - start) // group_size, tuple(pieces)))
    return FamilyLayout(tuple(buckets))


def group_by_family(
    params: Sequence[ParamSpec[FamilyT]], group_sizes: Mapping[FamilyT, int]
) -> dict[FamilyT, list[str]]:
    """Names of each family's parameters in the given order, families in the order of their first parameter.

    Raises ValueError if a parameter occurs twice (also in two families) or a family has no group size.
    """
    members: dict[FamilyT, list[str]] = {}
    owner: dict[str, FamilyT] = {}
    for param in params:
        if param.name in owner:
            raise ValueError(
                f"parameter {param.name!r} is in families {owner[param.name]!r} and {param.family!r}; "
                "each element needs exactly one owner"
            )
        if param.family not in group_sizes:
            raise ValueError(f"family {param.family!r} of parameter {param.name!r} has no process group")
        owner[param.name] = param.family
        members.setdefault(param.family, []).append(param.name)
    return members


def launch_order(buckets: Sequence[Sequence[int]]) -> list[int]:
    """Indices of buckets in the order in which backward is expected to complete them.

    ``buckets``: for each one the positions of its parameters in forward order. A bucket is complete when its first
    parameter in forward order has its gradient. A pure function of the model, so all ranks launch alike.
    """
    return sorted(range(len(buckets)), key=lambda index: (-min(buckets[index], default=0), index))
