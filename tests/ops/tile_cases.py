"""GPUs, problems and tiles that the tests of the choice and of its file share."""

from __future__ import annotations

import torch

from megatron.optimus.ops.triton.candidates import CANDIDATES, Entry, Tiles
from megatron.optimus.ops.triton.tiles import (
    Hardware,
    Problem,
    tiles_for,
)

H200 = Hardware("H200, 9.0, triton 3", 132, 232448, has_tma=True, keeps_last_stage=True)
ADA = Hardware("L40S, 8.9, triton 3", 142, 101376, has_tma=False, keeps_last_stage=False)
LIKE = torch.empty(0, dtype=torch.bfloat16)
PRODUCT = Problem("rows_times_weight", torch.bfloat16, 64, 2048, 1024, 131072)
FIRST, SECOND, THIRD = CANDIDATES["rows_times_weight"][:3]


def entry(tiles: Tiles, matches_default_bits: bool = True) -> Entry:
    return Entry(tiles, 10.0, 12.5, matches_default_bits)


def chosen(problem: Problem, slots: int | None = None) -> Tiles:
    return tiles_for(problem.kernel, LIKE.to(problem.dtype), *problem[2:5], problem.slots if slots is None else slots)
