"""Pieces of tensors, and the arithmetic that places them.

Every stored or requested piece is one element range of one flattened *box* of a global tensor; without a box, of the
whole tensor. That is the only notion of layout in this package. Data parallelism (ZeRO) cuts ranges, expert parallelism
takes rows of dim 0, tensor parallelism takes boxes (columns, or rows of each half of a merged weight), pipelines take
names; ``local_boxes`` and ``global_ranges`` say which global places a rank's own flattened parameter holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.optimus.checkpoint.errors import CheckpointError

Box = tuple[tuple[int, int], ...]  # [start, stop) in every dimension of the global tensor


class Place(NamedTuple):
    """Elements [start, stop) of the flattened ``box`` (None: everything) of a tensor of ``shape``."""

    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box | None = None


class Part(NamedTuple):
    """A block inside a 1-D tensor: ``flat[offset : offset + prod(sizes)].view(sizes)[window]``."""

    offset: int
    sizes: tuple[int, ...]
    window: Box

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The block, n-dimensional, sharing memory with ``flat``."""
        block = flat[self.offset : self.offset + math.prod(self.sizes)].view(self.sizes)
        return block[tuple(slice(low, high) for low, high in self.window)]

    @property
    def numel(self) -> int:
        return box_numel(self.window)


@dataclass(frozen=True)
class TensorSlice:
    """Elements [start, stop) of the flattened ``box`` (None: all) of the global tensor ``name``, held in ``tensor``.

    ``kind``: "master", "exp_avg", "exp_avg_sq" (fp32 optimizer state), "weight" (the parameter as the model computes
    with it), "buffer", "rng", or another lower-case word. ``tensor``: 1-D, contiguous, ``stop - start`` elements, any
    device; ``save`` reads it, ``load`` writes into it. ``stored_dtype``: what ``save`` casts to; None: its own.
    Raises CheckpointError when these do not fit together.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    box: Box | None = None
    stored_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        where = f"{self.name} ({self.kind})"
        if self.box is not None and not box_fits(self.box, self.global_shape):
            raise CheckpointError(f"{where}: box {self.box} is not inside shape {self.global_shape}")
        numel = math.prod(self.global_shape) if self.box is None else box_numel(self.box)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                f"{where}: [{self.start}, {self.stop}) is no range of its {numel} elements (shape {self.global_shape}"
                + (")" if self.box is None else f", box {self.box})")
            )
        if self.tensor.shape != (self.stop - self.start,) or not self.tensor.is_contiguous():
            raise CheckpointError(
                f"{where}: range [{self.start}, {self.stop}) needs a contiguous 1-D tensor of "
                f"{self.stop - self.start} elements, got shape {tuple(self.tensor.shape)}"
            )

    @property
    def place(self) -> Place:
        return Place(tuple(self.global_shape), self.start, self.stop, self.box)

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.stored_dtype or self.tensor.dtype


def box_fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` has one non-empty interval inside every dimension of ``shape``."""
    return len(box) == len(shape) and all(0 <= a < b <= size for (a, b), size in zip(box, shape, strict=True))


def box_numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def range_boxes(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a flattened block of ``sizes``, as at most 2 * dims - 1 boxes in flat order."""
    if start >= stop:
        return []
    if not sizes:
        return [()]
    rest = tuple(sizes[1:])
    row = math.prod(rest)
    first, start = divmod(start, row)
    last, stop = divmod(stop, row)
    if first == last:
        return [((first, first + 1), *box) for box in range_boxes(rest, start, stop)]
    boxes: list[Box] = []
    if start:
        boxes += [((first, first + 1), *box) for box in range_boxes(rest, start, row)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in rest)))
    return boxes + [((last, last + 1), *box) for box in range_boxes(rest, 0, stop)]


def global_boxes(place: Place) -> list[Box]:
    """The place as boxes of the global tensor, in the order of its elements."""
    box = place.box if place.box is not None else tuple((0, size) for size in place.shape)
    sizes = [stop - start for start, stop in box]
    return [
        tuple((low + origin, high + origin) for (low, high), (origin, _) in zip(part, box, strict=True))
        for part in range_boxes(sizes, place.start, place.stop)
    ]


def common_parts(first: Place, second: Place) -> Iterator[tuple[Part, Part]]:
    """Blocks that two places of one tensor share, as parts of the 1-D tensors that hold them, in a fixed order."""
    if first.box is None and second.box is None:
        low, high = max(first.start, second.start), min(first.stop, second.stop)
        if low < high:
            index = ((0, high - low),)
            yield Part(low - first.start, (high - low,), index), Part(low - second.start, (high - low,), index)
        return
    others = _with_offsets(second)
    for box, offset in _with_offsets(first):
        for other, other_offset in others:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
            if all(low < high for low, high in common):
                yield _part(box, offset, common), _part(other, other_offset, common)


def _with_offsets(place: Place) -> list[tuple[Box, int]]:
    result, offset = [], 0
    for box in global_boxes(place):
        result.append((box, offset))
        offset += box_numel(box)
    return result


def _part(box: Box, offset: int, common: Box) -> Part:
    sizes = tuple(stop - start for start, stop in box)
    index = tuple((low - start, high - start) for (low, high), (start, _) in zip(common, box, strict=True))
    return Part(offset, sizes, index)


def global_ranges(
    global_shape: Sequence[int], expert_ids: Sequence[int] | None, local_start: int, local_stop: int
) -> list[tuple[int, int, int]]:
    """Where elements [local_start, local_stop) of a flattened local parameter lie in the flattened global tensor.

    ``expert_ids[r]`` is the index along the global dim 0 of row r of the local dim 0; None: the local parameter is the
    global one. Returns ``(global_start, global_stop, local_start)`` in local order, split where neighbouring local rows
    are not neighbours globally; ``local_start`` counts from the beginning of the local parameter. Raises
    CheckpointError for a range or an expert number outside the parameter.
    """
    row = math.prod(global_shape[1:])
    local_numel = math.prod(global_shape) if expert_ids is None else len(expert_ids) * row
    if not 0 <= local_start <= local_stop <= local_numel:
        raise CheckpointError(f"[{local_start}, {local_stop}) is no range of a parameter of {local_numel} elements")
    if local_start == local_stop:
        return []
    if expert_ids is None:
        return [(local_start, local_stop, local_start)]
    ranges: list[tuple[int, int, int]] = []
    for local_row in range(local_start // row, (local_stop - 1) // row + 1):
        expert = expert_ids[local_row]
        if not 0 <= expert < global_shape[0]:
            raise CheckpointError(f"expert {expert} is outside dim 0 of shape {tuple(global_shape)}")
        start = max(local_start, local_row * row)
        stop = min(local_stop, (local_row + 1) * row)
        shift = (expert - local_row) * row
        if ranges and ranges[-1][1] == start + shift:
            ranges[-1] = (ranges[-1][0], stop + shift, ranges[-1][2])
        else:
            ranges.append((start + shift, stop + shift, start))
    return ranges


def local_boxes(
    global_shape: Sequence[int],
    dim: int,
    rank: int,
    size: int,
    *,
    parts: int = 1,
    expert_ids: Sequence[int] | None = None,
) -> list[Box]:
    """The boxes that, flattened one after the other, are tensor-parallel rank ``rank``'s own flattened parameter.

    Dim ``dim`` of the global tensor is cut into ``size`` equal shares; with ``parts`` > 1 it is that many equal
    matrices stacked (gate and up, or query, key and value), each cut by itself. ``expert_ids``: as in
    ``global_ranges``, for experts that are cut as well. Raises CheckpointError where the cut does not go even.
    """
    length = global_shape[dim]
    if length % (parts * size) or not 0 <= rank < size:
        raise CheckpointError(f"dim {dim} of {tuple(global_shape)} cannot give share {rank} of {size} in {parts} parts")
    share, part_length = length // parts // size, length // parts
    starts = [part * part_length + rank * share for part in range(parts)]
    rows: list[tuple[int, int]] = [(0, global_shape[0])]
    if dim > 0 and expert_ids is not None:
        rows = [(expert, expert + 1) for expert in expert_ids]
    elif dim > 0 and parts > 1:
        rows = [(row, row + 1) for row in range(global_shape[0])]
        if dim > 1:
            raise CheckpointError(f"stacked parts in dim {dim} are not supported: dim 0 or 1")
    boxes = []
    for row in rows if dim > 0 else [(0, 0)]:
        for start in starts:
            box = [(0, extent) for extent in global_shape]
            if dim > 0:
                box[0] = row
            box[dim] = (start, start + share)
            boxes.append(tuple(box))
    return boxes


def place_in_boxes(
    global_shape: Sequence[int], boxes: Sequence[Box], local_start: int, local_stop: int
) -> list[tuple[Place, int]]:
    """Where elements [local_start, local_stop) of a flattened local parameter made of ``boxes`` lie globally.

    Returns ``(place, local_start)`` in local order. Raises CheckpointError for a range outside the parameter.
    """
    places, position = [], 0
    for box in boxes:
        numel = box_numel(box)
        low, high = max(local_start, position), min(local_stop, position + numel)
        if low < high:
            places.append((Place(tuple(global_shape), low - position, high - position, box), low))
        position += numel
    if not 0 <= local_start <= local_stop <= position:
        raise CheckpointError(f"[{local_start}, {local_stop}) is no range of a parameter of {position} elements")
    return places
