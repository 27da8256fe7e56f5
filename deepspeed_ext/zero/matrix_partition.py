"""Which rank works on which whole matrix: pure functions for optimizers whose update needs whole matrices (Muon).

Masters and states stay in the flat layout of partition.py: equal shards for any number of ranks, padding of 0.1% or
less, views of parameters, checkpoints as for element-wise rules. What needs a whole matrix is only a step in between,
so every matrix (every expert of a 3-D weight is one) gets one owner, to which its parts travel and from which the
result returns. An owner is by preference the rank that holds most of the matrix anyway; with many matrices a rank
almost nothing travels.

A buffer layout of whole matrices instead, one shard of matrices a rank, would have to pad every shard to the largest:
the dense matrices of one stage of Mula-220B, 32 over 1,536 ranks, would take 48 times their size.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed_ext.optimizers.base import count_matrices
from deepspeed_ext.zero.partition import BucketLayout, FamilyLayout

# A holder keeps its matrix as long as its load stays within this factor of the best possible largest load.
_SLACK = 1.02


@dataclass(frozen=True)
class WholeMatrix:
    """``rows * columns`` elements from element ``start`` of the flattened parameter ``name``."""

    name: str
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Newton-Schulz on it, up to a factor that is the same for all: products with its smaller Gram matrix."""
        return self.numel * min(self.rows, self.columns)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of matrix number ``matrix`` of the plan, at ``offset`` of the rank's shard of a bucket."""

    matrix: int
    rank: int
    bucket: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class MatrixPlan:
    """The owner (rank of the group) of every matrix."""

    group_size: int
    matrices: tuple[WholeMatrix, ...]
    owners: tuple[int, ...]

    @cached_property
    def loads(self) -> list[int]:
        """Cost of each rank's matrices."""
        loads = [0] * self.group_size
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return loads


def matrices_of(name: str, shape: Sequence[int], stacked: int = 1) -> list[WholeMatrix]:
    """The matrices of one parameter, see optimizers.base.count_matrices."""
    count, (rows, columns) = count_matrices(name, shape, stacked)
    return [WholeMatrix(name, index * rows * columns, rows, columns) for index in range(count) if rows * columns]


def smallest_load(costs: Iterable[int], group_size: int) -> float:
    """A lower bound on the largest load of ``group_size`` ranks: the mean, and for every k that of the k + 1 cheapest
    of the k * group_size + 1 dearest, two of which share a rank at least k + 1 deep."""
    ordered = sorted(costs, reverse=True)
    bound = sum(ordered) / group_size
    for depth, last in enumerate(range(0, len(ordered), group_size), start=1):
        bound = max(bound, sum(ordered[last - depth + 1 : last + 1]))
    return bound


def plan_matrices(matrices: Sequence[WholeMatrix], holders: Sequence[int], group_size: int) -> MatrixPlan:
    """An owner for every matrix, balanced by cost; ``holders``: the rank that would like to own each one.

    From the dearest to the cheapest, a matrix goes to its holder while that stays near the best possible load, and
    what remains goes to the least loaded rank. So the largest load exceeds the mean by less than the dearest matrix.
    Depends on the arguments alone: every rank computes the same plan.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    costs = [matrix.cost for matrix in matrices]
    limit = smallest_load(costs, group_size) * _SLACK
    owners = _assign(costs, holders, group_size, limit)
    plan = MatrixPlan(group_size, tuple(matrices), tuple(owners))
    if max(plan.loads) > limit:  # few matrices a rank: where they lie must not decide
        balanced = MatrixPlan(group_size, tuple(matrices), tuple(_assign(costs, holders, group_size, 0)))
        plan = min(plan, balanced, key=lambda plan: max(plan.loads))
    return plan


def _assign(costs: Sequence[int], holders: Sequence[int], group_size: int, limit: float) -> list[int]:
    loads = [0] * group_size
    owners = [-1] * len(costs)
    rest = []
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = holders[index]
        if loads[rank] + costs[index] <= limit:
            owners[index] = rank
            loads[rank] += costs[index]
        else:
            rest.append(index)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in rest:
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + costs[index], rank))
    return owners


class SegmentMap:
    """Where the elements of a family's matrices lie in its flat layout."""

    def __init__(self, layout: FamilyLayout) -> None:
        self._buckets = layout.buckets
        self._pieces: dict[str, list[tuple[int, int, int, int]]] = {}  # start, stop, bucket, offset in it
        for index, bucket in enumerate(layout.buckets):
            for piece in bucket.pieces:
                self._pieces.setdefault(piece.name, []).append((piece.start, piece.stop, index, piece.offset))
        for pieces in self._pieces.values():
            pieces.sort()
        self._starts = {name: [piece[0] for piece in pieces] for name, pieces in self._pieces.items()}

    def segments(self, number: int, matrix: WholeMatrix) -> Iterator[Segment]:
        """The segments of a matrix in the order of its elements."""
        low, high = matrix.start, matrix.start + matrix.numel
        pieces = self._pieces[matrix.name]
        for start, stop, index, offset in pieces[bisect_right(self._starts[matrix.name], low) - 1 :]:
            if start >= high:
                return
            first, last = max(start, low), min(stop, high)
            yield from self._cut(number, self._buckets[index], index, offset + first - start, first - low, last - first)

    @staticmethod
    def _cut(number: int, bucket: BucketLayout, index: int, place: int, start: int, numel: int) -> Iterator[Segment]:
        """[place, place + numel) of a bucket, cut at the borders of its shards."""
        end = start + numel
        while start < end:
            rank, offset = divmod(place, bucket.shard_numel)
            length = min(end - start, bucket.shard_numel - offset)
            yield Segment(number, rank, index, offset, start, start + length)
            start, place = start + length, place + length

    def main_holder(self, matrix: WholeMatrix) -> int:
        """The rank that holds most of the matrix, the first of several."""
        held: dict[int, int] = {}
        for segment in self.segments(0, matrix):
            held[segment.rank] = held.get(segment.rank, 0) + segment.stop - segment.start
        return max(held, key=lambda rank: (held[rank], -rank))


def plan_family(layout: FamilyLayout, shapes: Mapping[str, tuple[Sequence[int], int]]) -> MatrixPlan:
    """The plan of one family; ``shapes``: for each parameter its shape and its number of stacked matrices."""
    where = SegmentMap(layout)
    matrices = [m for name, (shape, stacked) in shapes.items() for m in matrices_of(name, shape, stacked)]
    holders = [where.main_holder(matrix) for matrix in matrices]
    return plan_matrices(matrices, holders, layout.buckets[0].group_size)
