"""Exchange of whole matrices: parts go to the owner ranks, results return; matrix_partition.py decides the owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.optimizers.base import MatrixFunction, MatrixOptimizer, update_matrices_with_states_
from deepspeed_ext.zero.matrix_partition import MatrixPlan, ParamMatrices, ShardMap, WholeMatrix, plan_flat_buffer
from deepspeed_ext.zero.partition import BufferLayout, ShardRange

# Whole matrices of one shape that lie one after the other in the owner's own shard are worked on in place if they have
# this many elements; fewer are put together with others of their shape: many small products leave a GPU idle.
_IN_PLACE_NUMEL = 1 << 24


@dataclass(frozen=True)
class _MatrixBatch:
    """Matrices of one shape, one after the other.

    They begin at ``offset`` of the update of shard ``bucket``; with bucket -1: of the stage. There the parts of a
    matrix follow one another: together its rows in order, or with ``by_columns`` blocks of columns.
    """

    bucket: int
    offset: int
    matrices: tuple[WholeMatrix, ...]

    @property
    def count(self) -> int:
        return len(self.matrices)

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrices[0].rows, self.matrices[0].columns

    @property
    def numel(self) -> int:
        return self.count * self.shape[0] * self.shape[1]

    @property
    def by_columns(self) -> bool:
        return self.matrices[0].by_columns

    def is_continued_by(self, bucket: int, offset: int, matrix: WholeMatrix) -> bool:
        like = (self.shape, self.by_columns) == ((matrix.rows, matrix.columns), matrix.by_columns)
        return like and (self.bucket, self.offset + self.numel) == (bucket, offset)

    def with_another(self, matrix: WholeMatrix) -> _MatrixBatch:
        return replace(self, matrices=(*self.matrices, matrix))


class MatrixExchange:
    """The matrices of one flat buffer on one rank (implements optimizers.base.WholeMatrices).

    Matrices that this rank owns and that do not lie in one of its shards in sufficient number are collected in a stage,
    a tensor of all of them. Building this needs no communication: every rank computes the same plan.

    The states that a matrix has beside its flat ones (``MatrixOptimizer.matrix_states``) live at its owner, in the
    order of the batches.

    Args:
        layout: of the flat buffer.
        params: what the matrices of each parameter are.
        rank: this rank's in the group.
        group: over which matrices are brought together; None: this rank alone. It is the buffer's process group or,
            where ranks hold parts of every matrix, that times these ranks, which follow one another in it.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[str, ParamMatrices],
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan: MatrixPlan = plan_flat_buffer(layout, params)
        self._group = group
        self._shape_of = {matrix.name: (matrix.rows, matrix.columns) for matrix in self.plan.matrices}
        shard = rank * layout.buckets[0].group_size // self.plan.group_size  # ranks with other parts have the same one
        self._runs = [self._find_runs(layout, index, shard) for index in range(len(layout.buckets))]
        self._in_place: list[_MatrixBatch] = []  # worked on where they are
        self._staged: list[_MatrixBatch] = []  # worked on in the stage
        # This rank's parts of its own staged matrices, with their places in the stage.
        self._kept: list[tuple[ShardRange, int]] = []
        num_ranks = self.plan.group_size
        self._sent: list[list[ShardRange]] = [[] for _ in range(num_ranks)]  # by owner, in the order of matrices
        self._received: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # place in the stage, elements
        self.travelling_numel = 0  # elements of the whole flat buffer that are sent to another rank (and return)
        self._stage_numel = 0
        self._find_places(ShardMap(layout), rank)
        self._states: dict[_MatrixBatch, dict[str, Tensor]] = {}

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
        in_place = {matrix for batch in self._in_place for matrix in batch.matrices}
        kinds = [(matrix.rows, matrix.columns, matrix.by_columns) for matrix in matrices]
        for index in sorted(range(len(matrices)), key=kinds.__getitem__):
            matrix, owner = matrices[index], owners[index]
            parts = list(shard_map.shard_ranges(matrix))
            self.travelling_numel += sum(part.numel for part in parts if part.rank != owner)
            if matrix in in_place:
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
        if self._staged and self._staged[-1].is_continued_by(-1, self._stage_numel, matrix):
            self._staged[-1] = self._staged[-1].with_another(matrix)
        else:
            self._staged.append(_MatrixBatch(-1, self._stage_numel, (matrix,)))
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
            if batches and batches[-1].is_continued_by(first.bucket, first.offset, matrix):
                batches[-1] = batches[-1].with_another(matrix)
            else:
                batches.append(_MatrixBatch(first.bucket, first.offset, (matrix,)))
        return [batch for batch in batches if batch.numel >= _IN_PLACE_NUMEL]

    def ranges(self, shard: int) -> Sequence[tuple[int, int, tuple[int, int]]]:
        """See WholeMatrices.ranges."""
        return self._runs[shard]

    def transform(self, updates: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """See WholeMatrices.transform. Matrices that are not sent are worked on while others are."""
        self._transform(updates, lambda batch, batch_BMN: batch_BMN.copy_(function(batch_BMN)))

    def new_states(self, optimizer: MatrixOptimizer, options: Mapping[str, Any], device: torch.device) -> None:
        """Creates the states of the matrices that this rank owns; ``options`` is the parameter group."""
        self._states = {
            batch: optimizer.new_matrix_states(batch.count, batch.shape, options, device)
            for batch in (*self._in_place, *self._staged)
        }

    def state_tensors(self) -> list[dict[str, Tensor]]:
        """Returns the live states of this rank's matrices, those of one shape [B, ...] together."""
        return list(self._states.values())

    def matrix_states(self) -> Iterator[tuple[WholeMatrix, dict[str, Tensor]]]:
        """Yields each matrix that this rank owns with its live states."""
        for batch, states in self._states.items():
            for place, matrix in enumerate(batch.matrices):
                yield matrix, {kind: tensor[place] for kind, tensor in states.items()}

    def transform_with_states(self, updates: Sequence[Tensor], function: MatrixFunction, skip: Tensor) -> None:
        """See WholeMatrices.transform_with_states."""
        self._transform(
            updates,
            lambda batch, batch_BMN: update_matrices_with_states_(batch_BMN, self._states[batch], function, skip),
        )

    def _transform(self, updates: Sequence[Tensor], update_: Callable[[_MatrixBatch, Tensor], Any]) -> None:
        sent = [_of_shard(updates, part) for parts in self._sent for part in parts]
        to_owner = _MatrixAllToAll(
            self._sent, self._received, self._group if self.travelling_numel else None, updates[0]
        )
        to_owner.start(sent)
        for batch in self._in_place:
            _apply(update_, updates[batch.bucket], batch)
        stage = updates[0].new_empty(self._stage_numel)
        kept = [_of_shard(updates, part) for part, _ in self._kept]
        kept_places = [stage[place : place + part.numel] for part, place in self._kept]
        _copy(kept_places, kept)
        places = [stage[place : place + numel] for parts in self._received for place, numel in parts]
        to_owner.finish(places)
        for batch in self._staged:
            _apply(update_, stage, batch)
        back = to_owner.reversed()
        back.start(places)
        _copy(kept, kept_places)
        back.finish(sent)


class _MatrixAllToAll:
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

    def reversed(self) -> _MatrixAllToAll:
        """Returns the way back."""
        back = _MatrixAllToAll([], [], self._group, self._like)
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


def _apply(update_: Callable[[_MatrixBatch, Tensor], Any], tensor: Tensor, batch: _MatrixBatch) -> None:
    """Updates a batch in place, of which ``update_`` gets whole matrices [B, M, N]."""
    rows, columns = batch.shape
    flat = tensor[batch.offset : batch.offset + batch.numel]
    if not batch.by_columns:
        update_(batch, flat.view(batch.count, rows, columns))
        return
    parts = batch.matrices[0].parts
    blocks = flat.view(batch.count, parts, rows, columns // parts)
    whole_BMN = blocks.transpose(1, 2).reshape(batch.count, rows, columns)  # a copy: columns lie apart
    update_(batch, whole_BMN)
    blocks.copy_(whole_BMN.view(batch.count, rows, parts, columns // parts).transpose(1, 2))
