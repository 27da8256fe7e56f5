"""Exact parameter counts, from the model itself on the meta device (no memory is used)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.models.decoder import Decoder


@dataclass(frozen=True)
class ParameterCounts:
    total: int
    active: int  # parameters one token meets: all but the experts it did not choose
    expert: int  # parameters of routed experts


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Counts of the whole model, tied weights once."""
    with torch.device("meta"):
        model = Decoder(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    expert = sum(parameter.numel() for layer in model.moe_layers() for parameter in layer.experts.parameters())
    idle_share = 1 - config.moe_router_topk / config.num_experts if config.is_moe else 0.0
    return ParameterCounts(total, total - round(expert * idle_share), expert)
