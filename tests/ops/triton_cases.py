"""Devices, dtypes and choices that the tests of single Triton kernels share."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]  # its dot has no bf16
NEEDS_TRITON = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
COUNTS = {
    "one_row": [1],
    "empty_experts": [0, 5, 0, 0, 70, 0],
    "no_rows": [0, 0, 0],
    "tile_edges": [63, 64, 65, 127, 128, 129],
    "skewed": [3, 1, 900, 40, 40],
    "more_slots_than_a_block": [517, 0, 300, 301],
}


def make_indices(counts: list[int], seed: int = 0) -> Tensor:
    """[T, 1] choices with the given number of slots per expert, and a few foreign slots, shuffled."""
    experts = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.full((7,), -1)])
    return experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))][:, None].to(DEVICE)


def expert_rows(values_TD: Tensor, indices_T1: Tensor, expert: int) -> Tensor:
    return values_TD[indices_T1[:, 0] == expert]
