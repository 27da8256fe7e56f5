"""Rotary position embedding: scores depend on distances alone, and rows of the table are found by position."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.schema import ModelConfig, RotaryScaling
from megatron.optimus.layers.rope import apply_rope, rope_at, rope_table

CPU = torch.device("cpu")


def config(**changes: object) -> ModelConfig:
    return ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", list(RotaryScaling))
def test_scores_depend_on_distances_alone(scaling: RotaryScaling) -> None:
    table = rope_table(9, config(rotary_scaling=scaling, rotary_scaling_factor=4.0), CPU)
    q, k = (apply_rope(torch.randn(1, 1, 1, 8).expand(1, 1, 9, 8).contiguous(), table)[0, 0] for _ in range(2))
    scores = q @ k.T
    for distance in range(9):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_rows_are_those_of_the_positions() -> None:
    table, positions_BS = rope_table(9, config(), CPU), torch.tensor([[0, 8, 3], [5, 5, 1]])
    x_BHSd = torch.randn(2, 2, 3, 8)
    rotated = apply_rope(x_BHSd, rope_at(table, positions_BS))
    for row, column in ((0, 1), (1, 0), (1, 2)):
        at = positions_BS[row, column]
        alone = apply_rope(
            x_BHSd[row : row + 1, :, column : column + 1], (table[0][at : at + 1], table[1][at : at + 1])
        )
        torch.testing.assert_close(rotated[row, :, column], alone[0, :, 0])
