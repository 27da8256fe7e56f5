"""Who owns which element: pure functions from parameters and group sizes to flat layouts and shards.

Parameters that are updated alike form a family (one optimizer parameter group, dense or one expert group, one dtype).
A family is laid out in one flat buffer, parameter after parameter, and the buffer is cut into one equal shard per rank
of the family's process group. Nothing here touches tensors or processes, so a layout for thousands of ranks costs no
more than a walk over the parameter list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Every parameter and every shard starts at a multiple of this many elements: 128 bytes in bf16, one cache line and
# enough for vectorised and TMA loads. A layout wastes less than ALIGNMENT elements per parameter and per rank.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the partitioner sees it: its name, its local element count, and the family it belongs to."""

    name: str
    numel: int
    family: Hashable


@dataclass(frozen=True)
class Placement:
    """Elements [0, numel) of a flattened parameter lie at [offset, offset + numel) of the flat buffer."""

    name: str
    numel: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """One family's flat buffer: ``group_size`` shards of ``shard_numel`` elements, placements in buffer order."""

    group_size: int
    shard_numel: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        """Length of the flat buffer, padding included."""
        return self.group_size * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(placement.numel for placement in self.placements)


@dataclass(frozen=True)
class ShardPiece:
    """Elements [start, stop) of a flattened parameter, found at ``offset`` of the owner's shard."""

    name: str
    start: int
    stop: int
    offset: int


def _round_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def flat_layout(params: Iterable[tuple[str, int]], group_size: int) -> FlatLayout:
    """Lays (name, numel) pairs out in the given order and cuts the buffer into ``group_size`` equal shards.

    Raises ValueError for a group without ranks, a negative size, or a name that occurs twice.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    placements: list[Placement] = []
    seen: set[str] = set()
    end = 0
    for name, numel in params:
        if numel < 0:
            raise ValueError(f"parameter {name!r} has numel={numel}; it must not be negative")
        if name in seen:
            raise ValueError(f"parameter {name!r} occurs twice; each element needs exactly one owner")
        seen.add(name)
        placements.append(Placement(name, numel, end))
        end += _round_up(numel)
    # Equal shards keep every collective a single *_tensor call; never empty, because backends differ on empty input.
    shard_numel = max(ALIGNMENT, _round_up(-(-end // group_size)))
    return FlatLayout(group_size, shard_numel, tuple(placements))


def shard_pieces(layout: FlatLayout, rank: int) -> tuple[ShardPiece, ...]:
    """The parts of parameters that ``rank`` of the family's group owns, in buffer order; empty if it holds padding."""
    if not 0 <= rank < layout.group_size:
        raise ValueError(f"rank={rank} is outside the group of {layout.group_size} ranks")
    low, high = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
    offsets = [placement.offset for placement in layout.placements]
    pieces = []
    for placement in layout.placements[max(0, bisect_right(offsets, low) - 1) :]:
        if placement.offset >= high:
            break
        start = max(placement.offset, low)
        stop = min(placement.offset + placement.numel, high)
        if start < stop:
            pieces.append(
                ShardPiece(placement.name, start - placement.offset, stop - placement.offset, offset=start - low)
            )
    return tuple(pieces)


def plan_families(params: Sequence[ParamSpec], group_sizes: Mapping[Hashable, int]) -> dict[Hashable, FlatLayout]:
    """One layout per family, families in the order in which their first parameter appears.

    Raises ValueError if a parameter occurs twice (also in two families) or a family has no group size.
    """
    members: dict[Hashable, list[tuple[str, int]]] = {}
    owner: dict[str, Hashable] = {}
    for param in params:
        if param.name in owner:
            raise ValueError(
                f"parameter {param.name!r} is in families {owner[param.name]!r} and {param.family!r}; "
                "each element needs exactly one owner"
            )
        if param.family not in group_sizes:
            raise ValueError(f"family {param.family!r} of parameter {param.name!r} has no process group")
        owner[param.name] = param.family
        members.setdefault(param.family, []).append((param.name, param.numel))
    return {family: flat_layout(pairs, group_sizes[family]) for family, pairs in members.items()}
