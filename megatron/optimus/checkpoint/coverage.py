"""Whether the pieces of a tensor cover it exactly once.

Ranges of the flattened whole tensor are sorted and compared with their neighbours. Boxes are cut apart along any
dimension in which they fall into separate groups, over and over; that is all that real layouts (grids with ragged
edges) need. The work is bounded, so a hostile manifest cannot keep the reader busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.slices import Box, Place, box_numel, global_boxes

_PAIRWISE = 64  # a group this small that no cut divides is compared pair by pair
_MAX_WORK_PER_BOX = 256


def check_coverage(where: str, shape: tuple[int, ...], places: Sequence[Place]) -> None:
    """Raises CheckpointError, opened by ``where``, unless the places cover every element of ``shape`` exactly once."""
    if all(place.box is None for place in places):
        _check_ranges(where, shape, places)
        return
    boxes = [box for place in places for box in global_boxes(place)]
    twice = _overlap(where, boxes)
    if twice is not None:
        raise CheckpointError(f"{where}: pieces: {_text(twice)} is covered twice")
    covered = sum(map(box_numel, boxes))
    if covered != math.prod(shape):
        raise CheckpointError(f"{where}: pieces: {math.prod(shape) - covered} elements of shape {shape} are missing")


def _check_ranges(where: str, shape: tuple[int, ...], places: Sequence[Place]) -> None:
    position, numel = 0, math.prod(shape)
    for place in sorted(places, key=lambda place: place.start):
        if place.start != position:
            problem = "covered twice" if place.start < position else "missing"
            low, high = sorted((place.start, position))
            raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")
        position = place.stop
    if position != numel:
        problem = "missing" if position < numel else f"beyond its shape {shape}"
        low, high = sorted((position, numel))
        raise CheckpointError(f"{where}: pieces: elements [{low}, {high}) are {problem}")


def _overlap(where: str, boxes: list[Box]) -> Box | None:
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
            parts = _separate(group, dim)
            if len(parts) > 1:
                groups += parts
                break
        else:
            if len(group) > _PAIRWISE:  # many boxes that no cut divides: nearly always two are the same
                group = sorted(group)[:_PAIRWISE]
                found = _first_common(group)
                if found is None:
                    raise CheckpointError(f"{where}: pieces: their placement is too irregular to be checked")
                return found
            found = _first_common(group)
            if found is not None:
                return found
    return None


def _separate(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes whose intervals in ``dim`` touch no other group's."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[dim]):
        if box[dim][0] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box[dim][1])
    return groups


def _first_common(boxes: list[Box]) -> Box | None:
    for first, second in combinations(boxes, 2):
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
        if all(low < high for low, high in common):
            return common
    return None


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
