"""Where the elements of a foreign tensor lie in ours: the one description that every format shares.

A foreign tensor, seen as a matrix, is a stack of blocks; a block is a rectangle of one of our tensors, seen as the
matrix of its rows (a 3-D expert weight is its experts' rows one below the other; a 1-D tensor is a column). That covers
one matrix per expert (Hugging Face), fused and interleaved projections (Megatron's QKV, its bias, and SwiGLU), and
slices along either dim (tensor parallelism). Reading and writing are copies of rectangles, so both are exact.
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
class Block:
    """Rows [row, row + rows) and columns [column, column + columns) of our tensor ``name``."""

    name: str
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Part:
    """A foreign tensor ``key`` of ``shape``: blocks of equal width, one below the other.

    ``padding``: rows of zeros that follow them (vocabularies are padded). ``copy``: the same elements are also in
    another part, from which they are read (norms and routers of further tensor-parallel ranks).
    """

    key: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    padding: int = 0
    copy: bool = False

    @property
    def columns(self) -> int:
        return row_width(self.shape)

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.columns


def whole(key: str, name: str, shape: tuple[int, ...], *, copy: bool = False) -> Part:
    """Our tensor under another name."""
    width = row_width(shape)
    return Part(key, shape, (Block(name, 0, math.prod(shape) // width, 0, width),), copy=copy)


def rows_of(key: str, name: str, shape: tuple[int, ...], start: int) -> Part:
    """A 2-D (or whole 1-D) foreign tensor that begins at element ``start`` of our tensor ``name``."""
    width = row_width(shape)
    return Part(key, shape, (Block(name, start // width, math.prod(shape) // width, 0, width),))


def below(first: Part, second: Part) -> Part:
    """One foreign tensor of the rows of both, those of ``first`` on top; ValueError where they are not as wide."""
    if first.columns != second.columns:
        raise ValueError(f"{first.key}: rows of {second.columns} columns below rows of {first.columns}")
    shape = (first.rows + second.rows, first.columns)
    return Part(first.key, shape, first.blocks + second.blocks)


def gather(part: Part, shapes: Shapes, read: ReadRange, dtype: torch.dtype) -> torch.Tensor:
    """The foreign tensor, made of ranges of ours."""
    if len(part.blocks) == 1 and not part.padding and part.columns == row_width(shapes[part.blocks[0].name]):
        [block] = part.blocks  # nothing to put together: no second copy
        start, size = block.row * block.columns, block.rows * block.columns
        return read(block.name, start, start + size).to(dtype).view(part.shape)
    result = torch.zeros(part.shape, dtype=dtype)
    stack, at = result.view(part.rows, part.columns), 0
    for block in part.blocks:
        width = row_width(shapes[block.name])
        rows = read(block.name, block.row * width, (block.row + block.rows) * width).view(block.rows, width)
        stack[at : at + block.rows] = rows[:, block.column : block.column + block.columns].to(dtype)
        at += block.rows
    return result


class Scatter:
    """Ranges of our tensors, put together from foreign ones.

    Raises CheckpointError when ``parts`` do not hold every element of every tensor exactly once.
    """

    def __init__(self, parts: Iterable[Part], shapes: Shapes, where: str) -> None:
        self._shapes = shapes
        self._blocks: dict[str, list[tuple[Block, Part, int]]] = defaultdict(list)  # block, its part, its row there
        for part in parts:
            at = 0
            for block in part.blocks:
                if not part.copy:
                    self._blocks[block.name].append((block, part, at))
                at += block.rows
        for name, shape in shapes.items():
            found = self._blocks[name]
            found.sort(key=lambda item: (item[0].row, item[0].column))
            held = sum(block.rows * block.columns for block, _, _ in found)
            if held != math.prod(shape):
                raise CheckpointError(
                    f"{where}: {name} needs {math.prod(shape)} elements, the tensors found for it hold {held}"
                )
        self._rows = {name: [item[0].row for item in found] for name, found in self._blocks.items()}
        self._tallest = {name: max((b.rows for b, _, _ in found), default=0) for name, found in self._blocks.items()}

    def parts_of(self, name: str) -> list[Part]:
        return [part for _, part, _ in self._blocks[name]]

    def read(self, name: str, start: int, stop: int, fetch: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Elements [start, stop) of our tensor, whole rows. ``fetch(key)`` gives a foreign tensor."""
        width = row_width(self._shapes[name])
        first, last = start // width, stop // width
        result: torch.Tensor | None = None
        for block, part, at in self._blocks[name][bisect_left(self._rows[name], first - self._tallest[name] + 1) :]:
            if block.row >= last:
                break
            low, high = max(first, block.row), min(last, block.row + block.rows)
            if low >= high:
                continue
            piece = fetch(part.key).reshape(part.rows, part.columns)[at + low - block.row : at + high - block.row]
            if high - low == last - first and block.columns == width:
                return piece.reshape(-1)
            if result is None:
                result = torch.empty(last - first, width, dtype=piece.dtype)
            result[low - first : high - first, block.column : block.column + block.columns] = piece
        assert result is not None, (name, start, stop)  # coverage was checked
        return result.view(-1)
