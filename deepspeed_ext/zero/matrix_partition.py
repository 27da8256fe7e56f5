"""Which rank works on which whole matrix: pure functions for optimizers whose update needs whole matrices (Muon).

Masters and states stay in the flat layout of partition.py: equal shards for any number of ranks, padding of 0.1% or
less, views of parameters, checkpoints as for element-wise optimizers. Only one step of the update needs whole matrices,
so every matrix (every expert of a 3-D weight is one) gets one owner rank, to which its parts are sent and from which
the result returns. The owner is by preference the rank that holds most of the matrix; with many matrices a rank almost
nothing is sent.

A matrix that tensor parallelism cuts has its parts on several ranks with the same flat layout: its owner is one of the
ranks that hold a shard of any part, so the exchange goes over data-parallel times tensor-parallel ranks.

A flat buffer of whole matrices instead, one shard of matrices a rank, would have to pad every shard to the largest: the
dense matrices of one stage of Mula-220B, 32 over 1,536 ranks, would take 48 times their size.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from deepspeed_ext.optimizers.base import count_matrices
from deepspeed_ext.zero.partition import BucketLayout, BufferLayout, ShardRange

# A rank keeps the matrix that it holds as long as its load stays within this factor of the best possible largest load.
_SLACK = 1.02


class ParamMatrices(NamedTuple):
    """What a parameter's matrices are.

    Attributes:
        shape: of the parameter on this rank.
        stacked: matrices one below the other (``stacked_matrices``).
        parts: ranks that each hold an equal part of every matrix.
        by_columns: the parts are columns, else rows.
    """

    shape: Sequence[int]
    stacked: int = 1
    parts: int = 1
    by_columns: bool = False


@dataclass(frozen=True)
class WholeMatrix:
    """A matrix of ``rows * columns`` elements, a part of which begins at ``start`` of the flattened parameter ``name``.

    Attributes:
        name: of the parameter.
        start: first element in the local parameter.
        rows: of the whole matrix.
        columns: likewise.
        parts: ranks that each hold a part at the same place of their parameter.
        by_columns: the parts are columns, else rows.
    """

    name: str
    start: int
    rows: int
    columns: int
    parts: int = 1
    by_columns: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return self.rows * self.columns

    @property
    def index(self) -> int:
        """Number of the matrix among those of its local parameter."""
        return self.start * self.parts // self.numel

    @property
    def cost(self) -> int:
        """Cost of Newton-Schulz, up to a factor that is the same for all: products with the smaller Gram matrix."""
        return self.numel * min(self.rows, self.columns)


@dataclass(frozen=True)
class MatrixPlan:
    """The owner rank, in the group, of every matrix."""

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


def matrices_of(
    name: str, shape: Sequence[int], stacked: int = 1, parts: int = 1, by_columns: bool = False
) -> list[WholeMatrix]:
    """Returns the matrices of one parameter; arguments as of ParamMatrices."""
    count, (rows, columns) = count_matrices(name, shape, stacked)
    numel = rows * columns  # of the part that is here
    rows, columns = (rows, columns * parts) if by_columns else (rows * parts, columns)
    return [WholeMatrix(name, i * numel, rows, columns, parts, by_columns) for i in range(count) if numel]


def smallest_load(costs: Iterable[int], group_size: int) -> float:
    """Returns a lower bound on the largest load of ``group_size`` ranks.

    The mean is one; for every k, so is the cost of the k + 1 cheapest of the k * group_size + 1 dearest matrices,
    because some rank has at least k + 1 of these.
    """
    ordered = sorted(costs, reverse=True)
    bound = sum(ordered) / group_size
    for depth, last in enumerate(range(0, len(ordered), group_size), start=1):
        bound = max(bound, sum(ordered[last - depth + 1 : last + 1]))
    return bound


def plan_matrices(matrices: Sequence[WholeMatrix], holders: Sequence[int], group_size: int) -> MatrixPlan:
    """Gives every matrix an owner rank, balanced by cost.

    From the dearest to the cheapest, a matrix goes to the rank that holds it while that stays near the best possible
    load, and what remains goes to the least loaded rank. So the largest load exceeds the mean by less than the dearest
    matrix. Every rank computes the same plan from the same arguments.

    Args:
        matrices: all matrices.
        holders: for each the rank that should own it if possible.
        group_size: number of ranks.

    Raises:
        ValueError: there is no rank.
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


class ShardMap:
    """Finds where matrices lie in the shards of a flat buffer."""

    def __init__(self, layout: BufferLayout) -> None:
        self._buckets, self._ranges = layout.buckets, layout.ranges
        self._starts = {name: [part.start for _, part in ranges] for name, ranges in self._ranges.items()}

    def shard_ranges(self, matrix: WholeMatrix) -> Iterator[ShardRange]:
        """Yields where the matrix lies, part by part, each in the order of its elements.

        Part p of ``matrix.parts`` is on the ranks of the exchange's group whose number modulo ``parts`` is p.
        """
        for part in range(matrix.parts):
            for found in self._local_ranges(matrix):
                yield replace(found, rank=found.rank * matrix.parts + part)

    def _local_ranges(self, matrix: WholeMatrix) -> Iterator[ShardRange]:
        low, high = matrix.start, matrix.start + matrix.numel // matrix.parts
        for index, part in self._ranges[matrix.name][bisect_right(self._starts[matrix.name], low) - 1 :]:
            if part.start >= high:
                return
            first, last = max(part.start, low), min(part.stop, high)
            yield from self._cut(self._buckets[index], index, part.offset + first - part.start, last - first)

    @staticmethod
    def _cut(bucket: BucketLayout, index: int, start: int, numel: int) -> Iterator[ShardRange]:
        """``numel`` elements from ``start`` of a bucket, cut at the borders of its shards."""
        stop = start + numel
        while start < stop:
            rank, offset = divmod(start, bucket.shard_numel)
            length = min(stop - start, bucket.shard_numel - offset)
            yield ShardRange(rank, index, offset, length)
            start += length

    def main_holder(self, matrix: WholeMatrix) -> int:
        """Returns the rank that holds most of the matrix, the first of several; of equal parts they take turns."""
        held: dict[int, int] = {}
        for part in self._local_ranges(matrix):
            held[part.rank] = held.get(part.rank, 0) + part.numel
        most = max(held, key=lambda rank: (held[rank], -rank))
        return most * matrix.parts + matrix.index % matrix.parts


def plan_flat_buffer(layout: BufferLayout, params: Mapping[str, ParamMatrices]) -> MatrixPlan:
    """Plans the matrices of one flat buffer over the ranks of the exchange's group.

    Args:
        layout: of the buffer.
        params: what each parameter's matrices are; ``parts`` is the same for all.

    Raises:
        ValueError: parameters of this buffer are cut into different numbers of parts.
    """
    shard_map = ShardMap(layout)
    matrices = [matrix for name, param in params.items() for matrix in matrices_of(name, *param)]
    holders = [shard_map.main_holder(matrix) for matrix in matrices]
    parts = {matrix.parts for matrix in matrices} or {1}
    if len(parts) > 1:
        raise ValueError(f"the matrices of one flat buffer are cut into {sorted(parts)} parts; cut all of them alike")
    return plan_matrices(matrices, holders, layout.buckets[0].group_size * parts.pop())
