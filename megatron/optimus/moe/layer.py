"""The Mixture-of-Experts block: route, dispatch, experts, combine; shared experts while tokens are on their way."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.moe.dispatch.base import Dispatcher, ExpertPass, LocalDispatcher, expert_pass
from megatron.optimus.moe.experts import Experts
from megatron.optimus.moe.router import Router, RouterLosses
from megatron.optimus.moe.shared import SharedExperts
from megatron.optimus.platform import metrics


class MoE(nn.Module):
    """Dropless top-K Mixture of SwiGLU experts: [B, S, D] -> [B, S, D] and the router's auxiliary losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = SharedExperts(config) if config.moe_shared_expert_intermediate_size else None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.expert_pass: ExpertPass = expert_pass
        self.is_first_shard = True  # of experts that expert tensor parallelism splits: it alone counts their slots

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, RouterLosses]:
        x_TD = x_BSD.flatten(0, 1)
        started = self.dispatcher.start(x_TD)  # beside the router, where a transport needs no choices to send tokens
        routing, losses, x_TD = self.router(x_TD)
        shared: list[Tensor] = []

        def overlapped() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts(x_BSD))

        y_TD, processed = self.expert_pass(self.dispatcher, self.experts, x_TD, routing, started, overlapped)
        # Summed over ranks, as experts work for tokens of other ranks; dropless routing means 0.
        routed = routing.indices_TK.numel()
        metrics.record("dropped_tokens", routed - processed if self.is_first_shard else routed, reduce="sum")
        y_BSD = y_TD.view_as(x_BSD)
        if self.shared_experts is not None:
            [shared_BSD] = shared  # a transport that does not call ``overlapped`` once must not pass for right
            y_BSD = y_BSD + shared_BSD
        return y_BSD, losses
