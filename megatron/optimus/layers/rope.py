"""Rotary position embedding (arXiv 2104.09864) in the half-rotation layout that Hugging Face checkpoints use."""

from __future__ import annotations

import torch
from torch import Tensor

RopeTable = tuple[Tensor, Tensor]  # cos, sin: fp32 [S, head_dim], or [B, 1, S, head_dim] where rows differ


def rope_table(length: int, head_dim: int, base: float, device: torch.device) -> RopeTable:
    """cos and sin of position * base^(-2i/head_dim) for positions 0..length-1."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * (base**-exponent)[None, :]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rope_at(table: RopeTable, positions_BS: Tensor) -> RopeTable:
    """The table's rows at the given positions (int64, each below the table's length), for tokens in that order."""
    cos, sin = (part[positions_BS].unsqueeze(1) for part in table)
    return cos, sin


def apply_rope(x_BHSd: Tensor, table: RopeTable) -> Tensor:
    """Rotates each pair (i, i + head_dim/2) of every head by its position's angle, in fp32."""
    cos, sin = table
    x = x_BHSd.float()
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos + rotated * sin).to(x_BHSd.dtype)
