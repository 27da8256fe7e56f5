"""The SwiGLU MLP against its definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.optimus.layers.mlp import MLP


def test_equals_its_definition() -> None:
    mlp, x = MLP(6, 10), torch.randn(2, 3, 6)
    expected = (F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected)
