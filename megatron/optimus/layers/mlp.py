"""The dense SwiGLU block (arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
