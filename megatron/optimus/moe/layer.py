"""The Mixture-of-Experts layer: router, token dispatcher, experts; shared experts while tokens travel.

Shapes: B sequences, S positions, T = B * S tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.optimus.config.family import build_part, family_of
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.moe.dispatch.base import TokenDispatcher
from megatron.optimus.moe.dispatch.local import LocalDispatcher
from megatron.optimus.moe.experts import Experts, SharedExperts
from megatron.optimus.moe.router import Router, RouterLosses
from megatron.optimus.platform import metrics


class MoE(nn.Module):
    """Dropless top-K Mixture of SwiGLU experts. Expert parallelism puts another dispatcher in (parallel/expert.py)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router: Router = build_part(family_of(config).router, config)
        self.experts = Experts(config)
        self.shared_experts = SharedExperts(config) if config.moe_shared_expert_intermediate_size else None
        self.dispatcher: TokenDispatcher = LocalDispatcher()
        # Expert tensor parallelism: the shards of an expert compute the same slots, and the first one counts them.
        self.is_first_shard = True

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, RouterLosses]:
        """The layer's output [B, S, D] in x's dtype, and the router's auxiliary losses."""
        x_TD = x_BSD.flatten(0, 1)
        in_flight = self.dispatcher.start(x_TD)  # beside the router, where a dispatcher needs no choices to send tokens
        routing, losses, x_TD = self.router(x_TD)
        shared: list[Tensor] = []

        def overlapped() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts(x_BSD))

        y_TD, processed = self.dispatcher.run_experts(self.experts, x_TD, routing, in_flight, overlapped)
        # Summed over ranks, because experts compute tokens of other ranks. Dropless routing gives 0.
        routed = routing.indices_TK.numel()
        metrics.record("dropped_tokens", routed - processed if self.is_first_shard else routed, reduce="sum")
        y_BSD = y_TD.view_as(x_BSD)
        if self.shared_experts is not None:
            [shared_BSD] = shared  # fails for a dispatcher that does not call ``overlapped`` exactly once
            y_BSD = y_BSD + shared_BSD
        return y_BSD, losses
