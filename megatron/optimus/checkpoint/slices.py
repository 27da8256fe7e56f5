"""Pieces of tensors, and the arithmetic that places them.

Every stored or requested piece is one element range of one flattened *global* tensor. That is the only notion of layout
in this package: data, expert, tensor and pipeline parallelism only change who holds which ranges. Sharding along dim 0
of an expert weight turns a range of the rank's own parameter into several global ranges; ``global_ranges`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.optimus.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class TensorSlice:
    """Elements [start, stop) of the flattened global tensor ``name``, held in ``tensor``.

    ``kind``: "master", "exp_avg", "exp_avg_sq" (fp32 optimizer state), "weight" (the parameter as the model computes
    with it), "buffer", or another lower-case word. ``tensor``: 1-D, contiguous, ``stop - start`` elements, any device;
    ``save`` reads it, ``load`` writes into it. Raises CheckpointError when these do not fit together.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        numel = math.prod(self.global_shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                f"{self.name} ({self.kind}): [{self.start}, {self.stop}) is no range of its {numel} elements "
                f"(shape {self.global_shape})"
            )
        if self.tensor.dim() != 1 or not self.tensor.is_contiguous() or len(self.tensor) != self.stop - self.start:
            raise CheckpointError(
                f"{self.name} ({self.kind}): range [{self.start}, {self.stop}) needs a contiguous 1-D tensor of "
                f"{self.stop - self.start} elements, got shape {tuple(self.tensor.shape)}"
            )


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
