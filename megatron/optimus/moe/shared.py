"""Shared experts: what every token gets beside its routed experts (arXiv 2401.06066).

Any number of them side by side is one SwiGLU MLP of their widths' sum. They are dense parameters: tensor parallelism
cuts them as the dense MLP, and the optimizer shards them over all data-parallel ranks, expert-parallel ones too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.layers.mlp import MLP


class SharedExperts(nn.Module):
    """mlp(x), or with a gate sigmoid(gate . x) * mlp(x) as in Qwen2-MoE: [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mlp = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)
        # Apart from the MLP, which sees the tokens of all tensor-parallel ranks: the gate sees this rank's alone.
        self.gate = nn.Linear(config.hidden_size, 1, bias=False) if config.moe_shared_expert_gate else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.mlp(x_BSD)
        return y_BSD if self.gate is None else torch.sigmoid(self.gate(x_BSD)) * y_BSD
