"""Exchange of whole matrices: parts go to the owner ranks, results return; matrix_partition.py decides the owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.zero.matrix_partition import MatrixPlan, ShardMap, WholeMatrix, plan_flat_buffer
from deepspeed_ext.zero.partition import BufferLayout, ShardRange

# Whole matrices of one shape that lie one after the other in the owner's own shard are worked on in place if they have
# this many elements; fewer are put together with others of their shape: many small products leave a GPU idle.
_IN_PLACE_NUMEL = 1 << 24


@dataclass(frozen=True)
class _MatrixBatch:
    """``count`` matrices of (rows, columns), one after the other.

    They begin at ``offset`` of the update of shard ``bucket``; with bucket -1: of the stage.
    """

    bucket: int
    offset: int
    count: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.count * self.shape[0] * self.shape[1]


class MatrixExchange:
    """The matrices of one flat buffer on one rank (implements optimizers.base.WholeMatrices).

    Matrices that this rank owns and that do not lie in one of its shards in sufficient number are collected in a stage,
    a tensor of all of them. Building this needs no communication: every rank computes the same plan.

    Args:
        layout: of the flat buffer.
        shapes: for each parameter its shape and its number of stacked matrices.
        rank: this rank's in the group.
        group: the buffer's process group; None: this rank alone.
    """

    def __init__(
        self,
        layout: BufferLayout,
        shapes: Mapping[str, tuple[Sequence[int], int]],
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan: MatrixPlan = plan_flat_buffer(layout, shapes)
        self._group = group
        self._shape_of = {matrix.name: (matrix.rows, matrix.columns) for matrix in self.plan.matrices}
        self._runs = [self._find_runs(layout, index, rank) for index in range(len(layout.buckets))]
        self._in_place: list[_MatrixBatch] = []  # worked on where they are
        self._staged: list[_MatrixBatch] = []  # worked on in the stage
        self._kept: list[
            tuple[ShardRange, int]
        ] = []  # this rank's parts of its own staged matrices, place in the stage
        num_ranks = self.plan.group_size
        self._sent: list[list[ShardRange]] = [[] for _ in range(num_ranks)]  # by owner, in the order of matrices
        self._received: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # place in the stage, elements
        self.travelling_numel = 0  # elements of the whole flat buffer that are sent to another rank (and return)
        self._stage_numel = 0
        self._find_places(ShardMap(layout), rank)

    def _find_runs(self, layout: BufferLayout, bucket: int, rank: int) -> list[tuple[int, int, tuple[int, int]]]:
        runs: list[tuple[int, int, tuple[int, int]]] = []
        for part in layout.buckets[bucket].shard_ranges(rank):
            start, stop, shape = part.offset, part.offset + part.numel, self._shape_of[part.name]
            if runs and runs[-1][1] == start and runs[-1][2] == shape:
                start = runs.pop()[0]
            runs.append((start, stop, shape))
        return runs

    def _find_places(self, shard_map: ShardMap, rank: int) -> None:
        """Decides for every matrix where it is worked on and which of its parts travel."""
        matrices, owners = self.plan.matrices, self.plan.owners
        self._in_place = self._find_batches(shard_map, rank)
        in_place = {
            (batch.bucket, batch.offset + i * batch.numel // batch.count)
            for batch in self._in_place
            for i in range(batch.count)
        }
        for index in sorted(range(len(matrices)), key=lambda index: (matrices[index].rows, matrices[index].columns)):
            matrix, owner = matrices[index], owners[index]
            parts = list(shard_map.shard_ranges(matrix))
            self.travelling_numel += sum(part.numel for part in parts if part.rank != owner)
            if owner == rank and (parts[0].bucket, parts[0].offset) in in_place and len(parts) == 1:
                continue
            place = self._stage_numel
            for part in parts:
                if owner == rank and part.rank == rank:
                    self._kept.append((part, place))
                elif owner == rank:
                    self._received[part.rank].append((place, part.numel))
                elif part.rank == rank:
                    self._sent[owner].append(part)
                place += part.numel
            if owner == rank:
                self._add_staged(matrix)

    def _add_staged(self, matrix: WholeMatrix) -> None:
        shape, start, count = (matrix.rows, matrix.columns), self._stage_numel, 1
        if self._staged and self._staged[-1].shape == shape:
            last = self._staged.pop()
            start, count = last.offset, last.count + 1
        self._staged.append(_MatrixBatch(-1, start, count, shape))
        self._stage_numel += matrix.numel

    def _find_batches(self, shard_map: ShardMap, rank: int) -> list[_MatrixBatch]:
        """Large batches of this rank's matrices that lie whole and one after the other in one of its shards."""
        batches: list[_MatrixBatch] = []
        for matrix, owner in zip(self.plan.matrices, self.plan.owners, strict=True):
            if owner != rank:
                continue
            first, *others = shard_map.shard_ranges(matrix)
            if others or first.rank != rank:
                continue
            shape = (matrix.rows, matrix.columns)
            last = batches[-1] if batches else None
            if last and (last.bucket, last.offset + last.numel, last.shape) == (first.bucket, first.offset, shape):
                batches[-1] = _MatrixBatch(last.bucket, last.offset, last.count + 1, shape)
            else:
                batches.append(_MatrixBatch(first.bucket, first.offset, 1, shape))
        return [batch for batch in batches if batch.numel >= _IN_PLACE_NUMEL]

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """See WholeMatrices.ranges."""
        return self._runs[shard]

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """See WholeMatrices.transform. Matrices that are not sent are worked on while others are."""
        sent = [_of_shard(updates, part) for parts in self._sent for part in parts]
        to_owner = _AllToAll(self._sent, self._received, self._group if self.travelling_numel else None, updates[0])
        to_owner.start(sent)
        for batch in self._in_place:
            _apply(function, updates[batch.bucket], batch)
        stage = updates[0].new_empty(self._stage_numel)
        kept = [_of_shard(updates, part) for part, _ in self._kept]
        kept_places = [stage[place : place + part.numel] for part, place in self._kept]
        _copy(kept_places, kept)
        places = [stage[place : place + numel] for parts in self._received for place, numel in parts]
        to_owner.finish(places)
        for batch in self._staged:
            _apply(function, stage, batch)
        back = to_owner.reversed()
        back.start(places)
        _copy(kept, kept_places)
        back.finish(sent)


class _AllToAll:
    """One all-to-all: this rank's parts are sent in the order of their owners, others come in by source rank."""

    def __init__(
        self,
        sent: Sequence[Sequence[ShardRange]],
        received: Sequence[Sequence[tuple[int, int]]],
        group: dist.ProcessGroup | None,
        like: Tensor,
    ) -> None:
        self._out = [sum(part.numel for part in parts) for parts in sent]
        self._in = [sum(numel for _, numel in parts) for parts in received]
        self._group = group
        self._like = like
        self._work: dist.Work | None = None

    def reversed(self) -> _AllToAll:
        """Returns the way back."""
        back = _AllToAll([], [], self._group, self._like)
        back._out, back._in = self._in, self._out
        return back

    def start(self, parts: Sequence[Tensor]) -> None:
        """Sends ``parts``. Collective, unless no rank of the group sends anything."""
        if self._group is None:
            return
        self._buffer = self._like.new_empty(sum(self._in))
        self._packed = torch.cat([*parts, self._like.new_empty(0)])  # alive until the transfer is done
        self._work = dist.all_to_all_single(
            self._buffer, self._packed, self._in, self._out, group=self._group, async_op=True
        )

    def finish(self, parts: Sequence[Tensor]) -> None:
        """Waits (on a GPU: makes the stream wait) and copies what was received into ``parts``."""
        if self._group is None:
            return
        assert self._work is not None
        self._work.wait()
        _copy(parts, self._buffer.split([part.numel() for part in parts]) if parts else [])


def _of_shard(updates: Sequence[Tensor], part: ShardRange) -> Tensor:
    return updates[part.bucket][part.offset : part.offset + part.numel]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _apply(function: Callable[[Tensor], Tensor], tensor: Tensor, batch: _MatrixBatch) -> None:
    batch_BMN = tensor[batch.offset : batch.offset + batch.numel].view(batch.count, *batch.shape)
    batch_BMN.copy_(function(batch_BMN))
