"""Brings whole matrices to their owners and results back; ownership and places are matrix_partition.py's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.zero.matrix_partition import MatrixPlan, SegmentMap, WholeMatrix, plan_family
from deepspeed_ext.zero.partition import FamilyLayout

# A stretch of whole matrices of one shape that lies in the owner's own shard is worked on in place from this length;
# shorter ones are put together with others of their shape, because many small products leave a GPU idle.
_IN_PLACE_NUMEL = 1 << 24


@dataclass(frozen=True)
class _Copy:
    """``numel`` elements at ``offset`` of the update of shard ``bucket``, and at ``place`` of the stage."""

    bucket: int
    offset: int
    place: int
    numel: int


@dataclass(frozen=True)
class _Sent:
    """``numel`` elements at ``offset`` of the update of shard ``bucket``."""

    bucket: int
    offset: int
    numel: int


@dataclass(frozen=True)
class _Stretch:
    """``count`` matrices of (rows, columns) from ``offset``; of a shard's update, or with bucket -1 of the stage."""

    bucket: int
    offset: int
    count: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.count * self.shape[0] * self.shape[1]


class MatrixExchange:
    """The matrices of one family on one rank (implements optimizers.base.WholeMatrices).

    ``shapes``: for each parameter of ``layout`` its shape and number of stacked matrices. ``group``: the family's, None
    if this rank is its only one. Building it needs no communication: every rank computes the same plan.
    """

    def __init__(
        self,
        layout: FamilyLayout,
        shapes: Mapping[str, tuple[Sequence[int], int]],
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan: MatrixPlan = plan_family(layout, shapes)
        self._group = group
        self._shape_of = {matrix.name: (matrix.rows, matrix.columns) for matrix in self.plan.matrices}
        self._runs = [self._find_runs(layout, index, rank) for index in range(len(layout.buckets))]
        self._in_place: list[_Stretch] = []  # worked on where they are
        self._staged: list[_Stretch] = []  # worked on in the stage
        self._kept: list[_Copy] = []  # this rank's parts of its own staged matrices
        self._sent: list[list[_Sent]] = [[] for _ in range(self.plan.group_size)]  # by owner, by matrix and element
        self._received: list[list[tuple[int, int]]] = [[] for _ in range(self.plan.group_size)]  # stage place, numel
        self.travelling_numel = 0  # elements of the whole family that go to another rank (and return)
        self._stage_numel = 0
        self._find_places(SegmentMap(layout), rank)

    def _find_runs(self, layout: FamilyLayout, bucket: int, rank: int) -> list[tuple[int, int, tuple[int, int]]]:
        runs: list[tuple[int, int, tuple[int, int]]] = []
        for piece in layout.buckets[bucket].shard_pieces(rank):
            start, stop, shape = piece.offset, piece.offset + piece.stop - piece.start, self._shape_of[piece.name]
            if runs and runs[-1][1] == start and runs[-1][2] == shape:
                start = runs.pop()[0]
            runs.append((start, stop, shape))
        return runs

    def _find_places(self, where: SegmentMap, rank: int) -> None:
        matrices, owners = self.plan.matrices, self.plan.owners
        self._in_place = self._find_stretches(where, rank)
        in_place = {
            (stretch.bucket, stretch.offset + i * stretch.numel // stretch.count)
            for stretch in self._in_place
            for i in range(stretch.count)
        }
        for index in sorted(range(len(matrices)), key=lambda index: (matrices[index].rows, matrices[index].columns)):
            matrix, owner = matrices[index], owners[index]
            segments = list(where.segments(index, matrix))
            self.travelling_numel += sum(s.stop - s.start for s in segments if s.rank != owner)
            if owner == rank and (segments[0].bucket, segments[0].offset) in in_place and len(segments) == 1:
                continue
            for segment in segments:
                numel = segment.stop - segment.start
                place = self._stage_numel + segment.start
                if owner == rank and segment.rank == rank:
                    self._kept.append(_Copy(segment.bucket, segment.offset, place, numel))
                elif owner == rank:
                    self._received[segment.rank].append((place, numel))
                elif segment.rank == rank:
                    self._sent[owner].append(_Sent(segment.bucket, segment.offset, numel))
            if owner == rank:
                self._add_staged(matrix)

    def _add_staged(self, matrix: WholeMatrix) -> None:
        shape, start, count = (matrix.rows, matrix.columns), self._stage_numel, 1
        if self._staged and self._staged[-1].shape == shape:
            last = self._staged.pop()
            start, count = last.offset, last.count + 1
        self._staged.append(_Stretch(-1, start, count, shape))
        self._stage_numel += matrix.numel

    def _find_stretches(self, where: SegmentMap, rank: int) -> list[_Stretch]:
        """Long stretches of this rank's matrices that lie whole and one after the other in one of its shards."""
        stretches: list[_Stretch] = []
        for index, (matrix, owner) in enumerate(zip(self.plan.matrices, self.plan.owners, strict=True)):
            if owner != rank:
                continue
            first, *others = where.segments(index, matrix)
            if others or first.rank != rank:
                continue
            shape = (matrix.rows, matrix.columns)
            last = stretches[-1] if stretches else None
            if last and (last.bucket, last.offset + last.numel, last.shape) == (first.bucket, first.offset, shape):
                stretches[-1] = _Stretch(last.bucket, last.offset, last.count + 1, shape)
            else:
                stretches.append(_Stretch(first.bucket, first.offset, 1, shape))
        return [stretch for stretch in stretches if stretch.numel >= _IN_PLACE_NUMEL]

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """See WholeMatrices.ranges."""
        return self._runs[shard]

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """See WholeMatrices.transform. Matrices that need not travel are worked on while others do."""
        to_owner = _Wire(self._sent, self._received, self._group if self.travelling_numel else None, updates[0])
        to_owner.start([_part(updates[c.bucket], c.offset, c.numel) for copies in self._sent for c in copies])
        for stretch in self._in_place:
            _apply(function, updates[stretch.bucket], stretch)
        stage = updates[0].new_empty(self._stage_numel)
        _copy(
            [_part(stage, c.place, c.numel) for c in self._kept],
            [_part(updates[c.bucket], c.offset, c.numel) for c in self._kept],
        )
        places = [_part(stage, place, numel) for parts in self._received for place, numel in parts]
        to_owner.finish(places)
        for stretch in self._staged:
            _apply(function, stage, stretch)
        back = to_owner.reversed()
        back.start(places)
        _copy(
            [_part(updates[c.bucket], c.offset, c.numel) for c in self._kept],
            [_part(stage, c.place, c.numel) for c in self._kept],
        )
        back.finish([_part(updates[c.bucket], c.offset, c.numel) for copies in self._sent for c in copies])


class _Wire:
    """One all-to-all: parts of this rank go out in the order of their destinations, others come in by source."""

    def __init__(
        self,
        sent: Sequence[Sequence[_Sent]],
        received: Sequence[Sequence[tuple[int, int]]],
        group: dist.ProcessGroup | None,
        like: Tensor,
    ) -> None:
        self._out = [sum(copy.numel for copy in copies) for copies in sent]
        self._in = [sum(numel for _, numel in parts) for parts in received]
        self._group = group
        self._like = like
        self._work: dist.Work | None = None

    def reversed(self) -> _Wire:
        """The way back."""
        wire = _Wire([], [], self._group, self._like)
        wire._out, wire._in = self._in, self._out
        return wire

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
        """Waits (on a GPU: makes the stream wait) and puts what came into ``parts``."""
        if self._group is None:
            return
        assert self._work is not None
        self._work.wait()
        _copy(parts, self._buffer.split([part.numel() for part in parts]) if parts else [])


def _part(tensor: Tensor, offset: int, numel: int) -> Tensor:
    return tensor[offset : offset + numel]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _apply(function: Callable[[Tensor], Tensor], tensor: Tensor, stretch: _Stretch) -> None:
    batch_BMN = _part(tensor, stretch.offset, stretch.numel).view(stretch.count, *stretch.shape)
    batch_BMN.copy_(function(batch_BMN))
