"""Ranges of tensors: the only notion of layout in checkpoints. Start reading this package here.

What a rank holds, wants or has stored of a tensor of the whole model is a *region* of it: the elements [start, stop) of
a flattened *box*, which is a rectangular block of the tensor (None: all of it).

    a tensor of shape (4, 6)        box ((0, 4), (3, 6)), columns 3 to 5: the share of the second of two
        . . . # # #                 tensor-parallel ranks. Flattened, it has 12 elements. ZeRO gives the
        . . . # # #                 first half of them, start=0 and stop=6, to one data-parallel rank (#),
        . . . o o o                 and the second half, start=6 and stop=12, to another (o).
        . . . o o o

ZeRO makes ranges, expert parallelism takes rows of dim 0, tensor parallelism takes boxes (columns, or rows of each half
of a merged weight), and pipeline stages take names. Four classes speak of ranges:

    Region         here          where the elements lie: shape, start, stop, box
    TensorSlice    here          a region of a named tensor, with this rank's memory for it: saved from, loaded into
    StoredPiece    manifest.py   a region of a named tensor as a file holds it, with its hash
    ReadChunk      reader.py     as much of a stored piece as is read in one go

An optimizer gives its states as shards (state.py); they become slices there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple, Protocol

import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.models.partition import Box

_PAIRWISE = 64  # a group this small that no cut divides is compared pair by pair
_MAX_WORK_PER_BOX = 256


class Region(NamedTuple):
    """Elements [start, stop) of the flattened ``box`` (None: everything) of a tensor of ``shape``."""

    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box | None = None

    @classmethod
    def from_json(cls, shape: Sequence[int], start: int, stop: int, box: Sequence[Sequence[int]] | None) -> Region:
        """Makes a region of one's fields as JSON gives them back, with lists for tuples."""
        return cls(tuple(shape), start, stop, None if box is None else tuple((low, high) for low, high in box))

    @property
    def numel(self) -> int:
        """Number of elements in the region."""
        return self.stop - self.start

    def boxes(self) -> list[Box]:
        """The same elements as boxes of the global tensor, in order."""
        box = self.box if self.box is not None else tuple((0, size) for size in self.shape)
        sizes = [stop - start for start, stop in box]
        return [
            tuple((low + origin, high + origin) for (low, high), (origin, _) in zip(inner, box, strict=True))
            for inner in range_boxes(sizes, self.start, self.stop)
        ]


class Encoded(Protocol):
    """Elements that are kept in fewer bits than they are stored in, as deepspeed_ext's StoredState has them."""

    @property
    def values(self) -> torch.Tensor:
        """The encoded elements, 1-D, one entry for each."""

    @property
    def scale(self) -> torch.Tensor | None:
        """What decoding needs besides the values; None: nothing."""

    def part(self, start: int, stop: int) -> Encoded:
        """Elements [start, stop) of these."""

    @property
    def first(self) -> int:
        """Number of the first element in its block."""

    def moved(self, values: torch.Tensor, scale: torch.Tensor | None, first: int | None = None) -> Encoded:
        """The same elements in other memory; with ``first``, other elements of such a state."""

    def read(self) -> torch.Tensor:
        """Decodes the elements into host memory."""


@dataclass(frozen=True)
class TensorSlice:
    """Elements [start, stop) of the flattened ``box`` (None: all) of the global tensor ``name``, held in ``tensor``.

    Args:
        name: of the tensor in the whole model.
        kind: "master", "exp_avg", "exp_avg_sq" (fp32 optimizer state), "weight" (the parameter as the model computes
            with it), "buffer", "rng", or another lower-case word.
        global_shape: of the whole tensor.
        start: first element, counted in the flattened box.
        stop: the element after the last.
        tensor: 1-D, contiguous, ``stop - start`` elements, on any device. ``save`` reads it, ``load`` writes into it.
        box: [start, stop) in every dimension of the whole tensor.
        stored_dtype: what ``save`` casts to and ``load`` from; None: the dtype of ``tensor``.
        encoded: decodes ``tensor``, its values, to ``stored_dtype``, for ``save`` only.

    Raises:
        CheckpointError: these do not fit together.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor
    box: Box | None = None
    stored_dtype: torch.dtype | None = None
    encoded: Encoded | None = None

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
    def region(self) -> Region:
        """Which elements of the global tensor the slice holds."""
        return Region(tuple(self.global_shape), self.start, self.stop, self.box)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is stored in."""
        return self.stored_dtype or self.tensor.dtype

    def memory(self) -> list[TensorSlice]:
        """What a copy for ``save`` takes: the slice itself, or of an encoded one the tensors as they are."""
        if self.encoded is None:
            return [self]
        tensors = [tensor for tensor in (self.encoded.values, self.encoded.scale) if tensor is not None]
        return [TensorSlice(self.name, self.kind, (len(one),), 0, len(one), one) for one in tensors]

    def moved(self, copies: Iterator[torch.Tensor]) -> TensorSlice:
        """The slice with the next of ``copies``, which are those of ``memory``, as its memory."""
        values = next(copies)
        if self.encoded is None:
            return replace(self, tensor=values)
        encoded = self.encoded.moved(values, None if self.encoded.scale is None else next(copies))
        return replace(self, tensor=values, encoded=encoded)

    def stored_values(self, most_bytes: int) -> Iterator[torch.Tensor]:
        """The elements in the dtype they are stored in, at most ``most_bytes`` at a time where they are converted."""
        if self.encoded is None and self.dtype == self.tensor.dtype:
            yield self.tensor
            return
        step = most_bytes // self.dtype.itemsize
        for start in range(0, self.stop - self.start, step):
            stop = min(start + step, self.stop - self.start)
            if self.encoded is not None:
                yield self.encoded.part(start, stop).read()
            else:
                yield self.tensor[start:stop].to(self.dtype)


def tensors_to_copy(slices: Sequence[TensorSlice]) -> list[TensorSlice]:
    """What a copy of these slices takes, in their order: ``memory`` of each that has elements."""
    return [memory for piece in slices if piece.start < piece.stop for memory in piece.memory()]


# ---- boxes


def box_fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` has one non-empty interval inside every dimension of ``shape``."""
    return len(box) == len(shape) and all(0 <= a < b <= size for (a, b), size in zip(box, shape, strict=True))


def box_numel(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def _intersection(first: Box, second: Box) -> Box | None:
    """The box that two boxes share; None when they share no element."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return common if all(low < high for low, high in common) else None


def range_boxes(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts elements [start, stop) of a flattened block of ``sizes`` into at most 2 * dims - 1 boxes, in order."""
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


# ---- what two regions share


class Overlap(NamedTuple):
    """A box of elements that two regions share. Each region has it inside a larger box, ``first`` and ``second``.

    The integer beside a larger box is the element of the region's own 1-D tensor with which that box begins.
    """

    box: Box
    first: tuple[Box, int]
    second: tuple[Box, int]

    @property
    def numel(self) -> int:
        """Number of elements that both regions have."""
        return box_numel(self.box)

    def in_first(self, flat: torch.Tensor) -> torch.Tensor:
        """The shared elements, n-dimensional, as a view of the first region's 1-D tensor."""
        return _window(flat, *self.first, self.box)

    def in_second(self, flat: torch.Tensor) -> torch.Tensor:
        """The shared elements, n-dimensional, as a view of the second region's 1-D tensor."""
        return _window(flat, *self.second, self.box)


def _window(flat: torch.Tensor, outer: Box, offset: int, inner: Box) -> torch.Tensor:
    block = flat[offset : offset + box_numel(outer)].view([stop - start for start, stop in outer])
    return block[tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(inner, outer, strict=True))]


def overlaps(first: Region, second: Region) -> Iterator[Overlap]:
    """The boxes of elements that two regions of one tensor share, in an order that depends on the regions alone."""
    if first.box is None and second.box is None:  # ranges of the same flattened tensor: boxes in its one dimension
        common = _intersection(((first.start, first.stop),), ((second.start, second.stop),))
        if common is not None:
            yield Overlap(common, (((first.start, first.stop),), 0), (((second.start, second.stop),), 0))
        return
    others = _with_offsets(second)
    for box, offset in _with_offsets(first):
        for other, other_offset in others:
            common = _intersection(box, other)
            if common is not None:
                yield Overlap(common, (box, offset), (other, other_offset))


def _with_offsets(region: Region) -> list[tuple[Box, int]]:
    result, offset = [], 0
    for box in region.boxes():
        result.append((box, offset))
        offset += box_numel(box)
    return result


# ---- from a rank's own parameter to regions of the global one


def global_ranges(
    global_shape: Sequence[int], expert_ids: Sequence[int] | None, local_start: int, local_stop: int
) -> list[tuple[int, int, int]]:
    """Finds where elements of a flattened local parameter lie in the flattened global tensor.

    Args:
        global_shape: of the global tensor.
        expert_ids: ``expert_ids[r]`` is the index along the global dim 0 of row r of the local dim 0; None: the local
            parameter is the global one.
        local_start: first element of the local parameter that is asked for.
        local_stop: the element after the last.

    Returns:
        ``(global_start, global_stop, local_start)`` in local order, split where neighbouring local rows are not
        neighbours globally. ``local_start`` counts from the beginning of the local parameter.

    Raises:
        CheckpointError: a range or an expert number is outside the parameter.
    """
    row = math.prod(global_shape[1:])
    local_numel = math.prod(global_shape) if expert_ids is None else len(expert_ids) * row
    _check_range(local_start, local_stop, local_numel)
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


def regions_in_boxes(
    global_shape: Sequence[int], boxes: Sequence[Box], local_start: int, local_stop: int
) -> list[tuple[Region, int]]:
    """Finds where elements of a flattened local parameter lie that is made of boxes of the global tensor.

    Args:
        global_shape: of the global tensor.
        boxes: flattened one after the other, they are the local parameter.
        local_start: first element of the local parameter that is asked for.
        local_stop: the element after the last.

    Returns:
        ``(region, local_start)`` in local order.

    Raises:
        CheckpointError: the range is outside the parameter.
    """
    regions, position = [], 0
    for box in boxes:
        numel = box_numel(box)
        low, high = max(local_start, position), min(local_stop, position + numel)
        if low < high:
            regions.append((Region(tuple(global_shape), low - position, high - position, box), low))
        position += numel
    _check_range(local_start, local_stop, position)
    return regions


def _check_range(start: int, stop: int, numel: int) -> None:
    if not 0 <= start <= stop <= numel:
        raise CheckpointError(f"[{start}, {stop}) is no range of a parameter of {numel} elements")


# ---- coverage


def check_coverage(where: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
    """Checks that regions cover a tensor exactly once.

    Ranges of the whole tensor are sorted and compared with their neighbours. Boxes are cut apart along any dimension
    in which they fall into separate groups, again and again; real layouts (grids with ragged edges) need no more. The
    work is bounded, so a hostile manifest cannot keep the reader busy.

    Args:
        where: opens the error's message.
        shape: of the tensor.
        regions: all of them of this tensor.

    Raises:
        CheckpointError: an element is missing or covered twice, or the work exceeds its bound.
    """
    if all(region.box is None for region in regions):
        _check_ranges(where, shape, regions)
        return
    boxes = [box for region in regions for box in region.boxes()]
    twice = _covered_twice(where, boxes)
    if twice is not None:
        text = ", ".join(f"{start}:{stop}" for start, stop in twice)
        raise CheckpointError(f"{where}: pieces: [{text}] is covered twice")
    covered = sum(map(box_numel, boxes))
    if covered != math.prod(shape):
        raise CheckpointError(f"{where}: pieces: {math.prod(shape) - covered} elements of shape {shape} are missing")


def _check_ranges(where: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
    position, numel = 0, math.prod(shape)
    for region in sorted(regions, key=lambda region: region.start):
        if region.start != position:
            problem = "covered twice" if region.start < position else "missing"
            low, high = sorted((region.start, position))
            raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")
        position = region.stop
    if position != numel:
        problem = "missing" if position < numel else f"beyond its shape {shape}"
        low, high = sorted((position, numel))
        raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")


def _covered_twice(where: str, boxes: list[Box]) -> Box | None:
    """A box that two of ``boxes`` share; None when there is none."""
    groups, work = [boxes], 0
    while groups:
        group = groups.pop()
        work += len(group)
        if work > _MAX_WORK_PER_BOX * len(boxes):
            raise CheckpointError(f"{where}: pieces: their placement is too irregular to be checked")
        if len(group) < 2:
            continue
        for dim in range(len(group[0])):
            apart = _separate(group, dim)
            if len(apart) > 1:
                groups += apart
                break
        else:
            found = _first_common(sorted(group)[:_PAIRWISE] if len(group) > _PAIRWISE else group)
            if found is not None:
                return found
            if len(group) > _PAIRWISE:  # among so many boxes that no cut divides, two are nearly always the same
                raise CheckpointError(f"{where}: pieces: their placement is too irregular to be checked")
    return None


def _separate(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes whose intervals in ``dim`` touch those of no other group."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[dim]):
        if box[dim][0] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[dim][1])
    return groups


def _first_common(boxes: list[Box]) -> Box | None:
    shared = (_intersection(first, second) for first, second in combinations(boxes, 2))
    return next((box for box in shared if box is not None), None)
