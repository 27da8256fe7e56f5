"""Rotary position embedding (arXiv 2104.09864) in the half-rotation layout that Hugging Face checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.config.schema import ModelConfig, RotaryScaling

RopeTable = tuple[Tensor, Tensor]  # cos, sin: fp32 [S, head_dim], or [B, 1, S, head_dim] where rows differ


def rope_table(length: int, config: ModelConfig, device: torch.device) -> RopeTable:
    """Table of the rotation angles, position * frequency, for positions 0 to length - 1.

    Args:
        length: number of positions.
        config: head width, base and scaling of the frequencies.
        device: where the table is made.

    Returns:
        cos and sin of the angles, fp32 [length, head_dim] each.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequency = _scaled(config.rotary_base**-exponent, config)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency[None, :]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rope_at(table: RopeTable, positions_BS: Tensor) -> RopeTable:
    """The table's rows for tokens at other positions than 0 to S - 1.

    Args:
        table: of ``rope_table``.
        positions_BS: int64, each below the table's length.

    Returns:
        cos and sin, fp32 [B, 1, S, head_dim] each.
    """
    cos, sin = (part[positions_BS].unsqueeze(1) for part in table)
    return cos, sin


def _scaled(frequency: Tensor, config: ModelConfig) -> Tensor:
    """Frequencies for sequences longer than those of the training, see RotaryScaling."""
    if config.rotary_scaling is RotaryScaling.NONE:
        return frequency
    if config.rotary_scaling is RotaryScaling.LINEAR:
        return frequency / config.rotary_scaling_factor
    low, high = config.rotary_low_freq_factor, config.rotary_high_freq_factor
    rotations = config.rotary_original_positions * frequency / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / config.rotary_scaling_factor)


def apply_rope(x_BHSd: Tensor, table: RopeTable) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) of every head by the angle of its position: [B, H, S, d], in fp32."""
    return ops.rotate(x_BHSd, *table)
