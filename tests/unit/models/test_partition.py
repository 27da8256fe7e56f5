"""Blocks of whole weights, and where they come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.optimus.models.partition import block_of, local_shard_of, split_parameter


def from_boxes(whole: torch.Tensor, boxes: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
    return torch.cat([whole[tuple(slice(low, high) for low, high in box)].flatten() for box in boxes])


@pytest.mark.parametrize(
    ("shape", "dim", "stride"),
    [((12,), 0, 1), ((12, 5), 0, 1), ((5, 12), 1, 1), ((3, 12, 4), 1, 2), ((3, 4, 12), 2, 1)],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_make_up_the_whole_and_know_their_place(
    shape: tuple[int, ...], dim: int, stride: int, count: int
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    rows = [2, 0] if len(shape) == 3 else None
    param = nn.Parameter(whole if rows is None else whole[rows])
    param.kept = 7  # type: ignore[attr-defined]
    parts = [split_parameter(param, dim, index, count, stride=stride, whole=shape, rows=rows) for index in range(count)]
    for part in parts:
        assert part.is_contiguous() and part.kept == 7 and part.global_shape == shape
        assert torch.equal(from_boxes(whole, part.global_boxes), part.detach().flatten())
        assert torch.equal(local_shard_of(param.detach(), part), part)
    halves = [part.detach().chunk(stride, dim) for part in parts]
    assert torch.equal(torch.cat([half[s] for s in range(stride) for half in halves], dim), param)


def test_gate_and_up_are_cut_alike() -> None:
    gate_up = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]])  # gate 0, 1; up 2, 3
    assert block_of(gate_up, 1, 1, 2, stride=2).flatten().tolist() == [1.0, 3.0]
