"""Optimizers that need sums over whole tensors (LAMB, LARS, MARS, cautious AdamW), and how their parts are added up.

A tensor lies in the shards of several ranks, and with tensor parallelism other ranks hold further parts of it. A
``TensorOptimizer`` therefore adds up what this rank has, hands the sums out (``yield``) and gets the whole ones back;
it never sees a process group. ``run_in_rounds`` drives the optimizers of all flat buffers together, so that a round
costs one reduction over each group, however many tensors there are.

A tensor is a parameter, but each matrix of a 3-D weight (the experts of a layer) is one of its own: what an expert does
depends neither on the other experts nor on which of them share a rank.

Shapes: T tensors of a flat buffer, n elements of a block.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import ShardBlock, block_numel, blocks_of, wide_dtype

# Yields a rank's own sums, 1-D or of any shape, and is sent the sums over all ranks that hold parts.
Rounds = Generator[Tensor, Tensor, None]


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of ``shape``, at most a matrix, from element ``start`` of the flattened parameter ``name``.

    ``shape`` is that of this rank's part; tensor parallelism has cut ``cut_dim`` (None: nothing) over ``num_cuts``
    ranks.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    is_matrix: bool
    num_cuts: int = 1
    cut_dim: int | None = None

    @property
    def numel(self) -> int:
        """Elements on this rank and those that share its shards."""
        rows, columns = self.shape
        return rows * columns


def tensors_of(name: str, shape: Sequence[int], num_cuts: int = 1, cut_dim: int | None = None) -> list[WholeTensor]:
    """Returns the tensors of one parameter: itself, or the matrices of a 3-D one.

    Args:
        name: of the parameter.
        shape: on this rank. A tensor's is [rows, columns]: of a vector [n, 1], of four dimensions [first, others].
        num_cuts: tensor-parallel ranks that hold a part.
        cut_dim: the dimension of the parameter that they share; None: unknown.
    """
    count, rows, *others = shape if len(shape) == 3 else (1, *(shape or [1]))
    columns = math.prod(others)
    cut = None
    if num_cuts > 1 and cut_dim is not None:
        cut = min(cut_dim - (len(shape) == 3), 1)
    return [
        WholeTensor(name, index * rows * columns, (rows, columns), len(shape) > 1, num_cuts, cut)
        for index in range(count)
        if rows * columns
    ]


@dataclass(frozen=True)
class TensorRun:
    """Elements of a block: ``count`` tensors of ``length`` elements each one after the other, the first is ``first``.

    A part of a tensor is a run of its own, with count 1; ``offset`` is its first element's position in the tensor.
    """

    start: int
    count: int
    length: int
    first: int
    offset: int = 0

    @property
    def where(self) -> slice:
        """The elements in the block."""
        return slice(self.start, self.start + self.count * self.length)


def runs_in(start: int, stop: int, at: int, numel: int, first: int) -> Iterator[TensorRun]:
    """Yields elements [start, stop) of consecutive tensors of ``numel`` elements as runs.

    Args:
        start: first element, counted from the first tensor's.
        stop: one past the last.
        at: position of ``start`` in the block.
        numel: elements of each tensor.
        first: number of the first tensor.
    """
    while start < stop:
        index, offset = divmod(start, numel)
        count = (stop - start) // numel if offset == 0 else 0
        length = numel if count else min(stop - start, numel - offset)
        yield TensorRun(at, count or 1, length, first + index, offset)
        start, at = start + (count or 1) * length, at + (count or 1) * length


@dataclass
class TensorBlock(ShardBlock):
    """A block of a shard; ``runs`` say which tensors its elements belong to."""

    runs: Sequence[TensorRun] = ()

    def sum_into(self, sums_T: Tensor, values_n: Tensor) -> None:
        """Adds every tensor's values to its sum."""
        for run in self.runs:
            part = values_n[run.where].view(run.count, run.length).sum(dim=1)
            sums_T[run.first : run.first + run.count] += part

    def spread(self, numbers_T: Tensor, padding: float = 0.0) -> Tensor:
        """Returns for every element its tensor's number: fp32 [n]. ``padding``: of elements of no tensor."""
        result = torch.full_like(self.master, padding)
        for run in self.runs:
            numbers = numbers_T[run.first : run.first + run.count, None].float()
            result[run.where].view(run.count, run.length).copy_(numbers.expand(run.count, run.length))
        return result


class WholeTensors:
    """The tensors of one flat buffer, on a rank that owns some of their elements.

    Args:
        tensors: all T of them, in the order of the buffer.
        shards: for each shard of this rank its (name, start, stop, offset) ranges: elements [start, stop) of the
            flattened parameter from ``offset`` of the shard on.
        device: where the sums are.
        cut_index: this rank among those that tensor parallelism has cut the tensors over.

    Attributes:
        state: what the optimizer keeps for whole tensors (``TensorOptimizer.new_tensor_state``).
    """

    def __init__(
        self,
        tensors: Sequence[WholeTensor],
        shards: Iterable[Sequence[tuple[str, int, int, int]]],
        device: torch.device,
        cut_index: int = 0,
    ) -> None:
        self.tensors, self.device, self.cut_index = list(tensors), device, cut_index
        self.state: dict[str, Tensor] = {}
        self._first = {one.name: number for number, one in reversed(list(enumerate(self.tensors)))}
        self._shards = [list(ranges) for ranges in shards]
        self._runs: list[list[list[TensorRun]]] = [self._blocks(ranges) for ranges in self._shards]
        self.numels_T = torch.tensor([float(one.numel * one.num_cuts) for one in self.tensors], device=device)
        self.is_matrix_T = torch.tensor([one.is_matrix for one in self.tensors], device=device)

    def _blocks(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[list[TensorRun]]:
        size = block_numel(self.device)
        last = max((offset + stop - start for _, start, stop, offset in ranges), default=0)
        found: list[list[TensorRun]] = [[] for _ in range(-(-last // size))]
        for name, start, stop, offset in ranges:
            number = self._first[name]
            for index in range(offset // size, -(-(offset + stop - start) // size)):
                low, high = max(offset, index * size), min(offset + stop - start, (index + 1) * size)
                begin = start + low - offset
                numel = self.tensors[number].numel
                found[index] += runs_in(begin, begin + high - low, low - index * size, numel, number)
        return found

    def zeros(self, *shape: int) -> Tensor:
        """Returns zero sums [*shape, T], fp64 where the device has it."""
        return torch.zeros(*shape, len(self.tensors), dtype=wide_dtype(self.device), device=self.device)

    def choose(self, of_matrices: float, of_vectors: float) -> Tensor:
        """Returns one of two numbers for each tensor: [T]."""
        return torch.where(self.is_matrix_T, self.zeros() + of_matrices, self.zeros() + of_vectors)

    def blocks(
        self, shards: Sequence[Shard], kinds: Sequence[str], scalars: StepScalars, maximize: bool = False
    ) -> Iterator[TensorBlock]:
        """Yields the blocks of all shards of this rank, as ``blocks_of`` does; those of padding alone are left out."""
        for shard, runs in zip(shards, self._runs, strict=True):
            for block, own in zip(blocks_of(shard, kinds, scalars, maximize), runs, strict=False):
                yield TensorBlock(block.shard, block.first, scalars, kinds, maximize, own)


class TensorOptimizer(ShardOptimizer):
    """Updates element by element with numbers that are sums over whole tensors. ``update_tensors_`` replaces
    ``update_``.

    Attributes:
        tensor_kinds: names of the states that are not element-wise: none, or a number for each row and one for each
            column of the tensors (fp32, one after the other), of which every rank of the group has the same copy.
    """

    tensor_kinds: tuple[str, ...] = ()

    def new_tensor_state(self, tensors: WholeTensors, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Creates the states of ``tensor_kinds``, those of the rows first."""
        return {}

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """Raises TypeError: one shard does not hold whole tensors."""
        raise TypeError(f"{type(self).__name__} needs sums over whole tensors; use update_tensors_")

    def update_whole_(self, shard: Shard, param: Tensor, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_whole_."""
        tensors = WholeTensors(tensors_of("", param.shape), [[("", 0, param.numel(), 0)]], shard.master.device)
        for kind, state in self.new_tensor_state(tensors, options).items():
            tensors.state[kind] = shard.state.setdefault(kind, state)
        run_in_rounds([(self.update_tensors_([shard], tensors, options, scalars), ())])

    @abstractmethod
    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """Takes one step on all shards that a rank owns of one flat buffer.

        A generator: it yields this rank's sums, as often on every rank, and is sent the sums over all ranks.
        """


def run_in_rounds(updates: Sequence[tuple[Rounds, Sequence[dist.ProcessGroup]]]) -> None:
    """Drives ``update_tensors_`` of all flat buffers, with one reduction a round and group. Collective.

    Args:
        updates: each with the groups over which its sums go, one after the other; on all ranks of a group alike.
    """
    waiting = [(update, groups, _advance(update, None)) for update, groups in updates]
    while waiting := [(update, groups, sums) for update, groups, sums in waiting if sums is not None]:
        for depth in range(max(len(groups) for _, groups, _ in waiting)):
            together: dict[dist.ProcessGroup, list[Tensor]] = {}
            for _, groups, sums in waiting:
                if depth < len(groups):
                    together.setdefault(groups[depth], []).append(sums)
            for group, parts in together.items():
                _sum_over(group, parts)
        waiting = [(update, groups, _advance(update, sums)) for update, groups, sums in waiting]


def _advance(update: Rounds, sums: Tensor | None) -> Tensor | None:
    """Runs an update to its next sums; None at its end."""
    try:
        return next(update) if sums is None else update.send(sums)
    except StopIteration:
        return None


def _sum_over(group: dist.ProcessGroup, parts: Sequence[Tensor]) -> None:
    together = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(together, group=group)
    for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
        part.copy_(total.view(part.shape))
