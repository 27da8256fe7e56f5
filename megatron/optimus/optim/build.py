"""The element-wise optimizer that the sharded one runs on its shards."""

from __future__ import annotations

import torch
from torch import nn

from megatron.optimus.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over every parameter, all with weight decay as in the paper; torch's fused kernel on every device."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
