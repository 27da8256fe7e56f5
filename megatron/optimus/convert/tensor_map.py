"""Where the elements of a foreign tensor lie in ours: the one description of layouts that every format shares.

A foreign tensor, seen as a matrix, is a stack of submatrices of ours. One of our tensors is seen as the matrix of its
rows: a 3-D expert weight is the rows of all experts one below the other, a 1-D tensor is a column.

    Megatron's fused QKV           ours
    +-----------------+
    | q rows of head 0|  <-------  rows 0 to 3 of q_proj.weight
    | k row of head 0 |  <-------  row 0 of k_proj.weight
    | v row of head 0 |  <-------  row 0 of v_proj.weight
    | q rows of head 1|  <-------  rows 4 to 7 of q_proj.weight
    |       ...       |

This covers one matrix per expert (Hugging Face), fused and interleaved projections (Megatron's QKV, its bias, and
SwiGLU), and cuts along either dim (tensor parallelism). Reading and writing only copy elements, so both are exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.optimus.checkpoint.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
ReadRange = Callable[[str, int, int], torch.Tensor]  # (our name, start, stop) -> 1-D


def row_width(shape: tuple[int, ...]) -> int:
    """Columns of one of our tensors seen as a matrix."""
    return shape[-1] if len(shape) > 1 else 1


@dataclass(frozen=True)
class Submatrix:
    """Rows [row, row + rows) and columns [column, column + columns) of our tensor ``name``."""

    name: str
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another format: submatrices of ours, equally wide, one below the other.

    Args:
        key: its name in the file.
        shape: of the foreign tensor.
        submatrices: from top to bottom.
        padding: rows of zeros below them (vocabularies are padded).
        copy: the same elements are also in another foreign tensor, from which they are read (norms and routers of
            further tensor-parallel ranks).
    """

    key: str
    shape: tuple[int, ...]
    submatrices: tuple[Submatrix, ...]
    padding: int = 0
    copy: bool = False

    @property
    def columns(self) -> int:
        """Columns of the tensor as a matrix."""
        return row_width(self.shape)

    @property
    def rows(self) -> int:
        """Rows of the tensor as a matrix, padding included."""
        return math.prod(self.shape) // self.columns


def rows_of(key: str, name: str, shape: tuple[int, ...], start: int = 0) -> ForeignTensor:
    """A foreign tensor of ``shape`` whose elements follow each other in our tensor ``name``, from ``start`` on."""
    width = row_width(shape)
    return ForeignTensor(key, shape, (Submatrix(name, start // width, math.prod(shape) // width, 0, width),))


def stack_rows(first: ForeignTensor, second: ForeignTensor) -> ForeignTensor:
    """One foreign tensor of the rows of both, those of ``first`` on top. Raises ValueError if they differ in width."""
    if first.columns != second.columns:
        raise ValueError(f"{first.key}: rows of {second.columns} columns below rows of {first.columns}")
    shape = (first.rows + second.rows, first.columns)
    return ForeignTensor(first.key, shape, first.submatrices + second.submatrices)


def assemble(tensor: ForeignTensor, shapes: Shapes, read: ReadRange, dtype: torch.dtype) -> torch.Tensor:
    """Assembles a foreign tensor from ranges of ours.

    Args:
        tensor: the foreign tensor.
        shapes: of our tensors, by name.
        read: gives a range of one of our tensors.
        dtype: of the result.
    """
    if len(tensor.submatrices) == 1 and not tensor.padding:
        [only] = tensor.submatrices
        if tensor.columns == row_width(shapes[only.name]):  # a range of ours as it is: no second copy
            start, size = only.row * only.columns, only.rows * only.columns
            return read(only.name, start, start + size).to(dtype).view(tensor.shape)
    result = torch.zeros(tensor.shape, dtype=dtype)
    stack, at = result.view(tensor.rows, tensor.columns), 0
    for sub in tensor.submatrices:
        width = row_width(shapes[sub.name])
        rows = read(sub.name, sub.row * width, (sub.row + sub.rows) * width).view(sub.rows, width)
        stack[at : at + sub.rows] = rows[:, sub.column : sub.column + sub.columns].to(dtype)
        at += sub.rows
    return result


class RangeReader:
    """Reads ranges of our tensors from foreign ones.

    Args:
        tensors: all foreign tensors.
        shapes: of our tensors, by name.
        where: opens the error's message.

    Raises:
        CheckpointError: the foreign tensors do not hold as many elements as one of ours has.
    """

    def __init__(self, tensors: Iterable[ForeignTensor], shapes: Shapes, where: str) -> None:
        self._shapes = shapes
        # For each of our tensors: its submatrices, each with the foreign tensor that holds it and the row there.
        self._held: dict[str, list[tuple[Submatrix, ForeignTensor, int]]] = defaultdict(list)
        for tensor in tensors:
            at = 0
            for sub in tensor.submatrices:
                if not tensor.copy:
                    self._held[sub.name].append((sub, tensor, at))
                at += sub.rows
        for name, shape in shapes.items():
            held = self._held[name]
            held.sort(key=lambda item: (item[0].row, item[0].column))
            numel = sum(sub.rows * sub.columns for sub, _, _ in held)
            if numel != math.prod(shape):
                raise CheckpointError(
                    f"{where}: {name} needs {math.prod(shape)} elements, the tensors found for it hold {numel}"
                )
        self._rows = {name: [sub.row for sub, _, _ in held] for name, held in self._held.items()}
        self._tallest = {name: max((s.rows for s, _, _ in held), default=0) for name, held in self._held.items()}

    def tensors_of(self, name: str) -> list[ForeignTensor]:
        """The foreign tensors that hold our tensor ``name``."""
        return [tensor for _, tensor, _ in self._held[name]]

    def read(self, name: str, start: int, stop: int, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Reads elements [start, stop) of our flattened tensor ``name``, whole rows of it.

        Args:
            name: of our tensor.
            start: the first element of a row.
            stop: the element after the last of a row.
            fetch: gives a foreign tensor by its key.

        Returns:
            A 1-D tensor; it shares memory with a foreign tensor where that holds the range in one stretch.
        """
        width = row_width(self._shapes[name])
        first, last = start // width, stop // width
        result: torch.Tensor | None = None
        for sub, tensor, at in self._held[name][bisect_left(self._rows[name], first - self._tallest[name] + 1) :]:
            if sub.row >= last:
                break
            low, high = max(first, sub.row), min(last, sub.row + sub.rows)
            if low >= high:
                continue
            found = fetch(tensor.key).reshape(tensor.rows, tensor.columns)[at + low - sub.row : at + high - sub.row]
            if high - low == last - first and sub.columns == width:
                return found.reshape(-1)
            if result is None:
                result = torch.empty(last - first, width, dtype=found.dtype)
            result[low - first : high - first, sub.column : sub.column + sub.columns] = found
        assert result is not None, (name, start, stop)  # the constructor has checked that everything is held
        return result.view(-1)
