"""The Mixture-of-Experts block: route, dispatch, experts, combine."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.moe.dispatch import Dispatcher, LocalDispatcher
from megatron.optimus.moe.experts import Experts
from megatron.optimus.moe.router import Router, RouterStats


class MoE(nn.Module):
    """Dropless top-K Mixture of SwiGLU experts: [B, S, D] -> [B, S, D] and the router's statistics."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, RouterStats]:
        x_TD = x_BSD.flatten(0, 1)
        routing, stats = self.router(x_TD)
        rows = self.dispatcher.dispatch(x_TD, routing)
        y_RD = self.experts(rows.x_RD, rows.weights_RK, rows.indices_RK)
        y_TD = self.dispatcher.combine(y_RD, rows.handle)
        return y_TD.view_as(x_BSD), stats._replace(processed=(rows.indices_RK >= 0).sum())
