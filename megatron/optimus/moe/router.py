"""The router: which experts a token goes to, with which weights, and the statistics that keep the load even.

Shapes: T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ScoreFunction
from megatron.optimus.moe.balance import load_balancing_loss, mean_entropy, router_z_loss, updated_expert_bias
from megatron.optimus.platform import metrics


class RouterLosses(NamedTuple):
    """Auxiliary losses of one router for one micro-batch: differentiable fp32 scalars, before their weights."""

    aux_loss: Tensor  # load balancing
    z_loss: Tensor


class Router(nn.Module):
    """Linear router in fp32 with top-K choice."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.topk = config.moe_router_topk
        self.sigmoid = config.moe_router_score_function is ScoreFunction.SIGMOID
        self.normalize = config.moe_router_norm_topk_prob
        self.balancing = config.moe_router_load_balancing_type
        self.force_uniform = config.moe_router_force_load_balancing
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Slots that this rank's tokens sent to each expert in the training forwards since ``finish_step``.
        self.register_buffer("step_counts_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.step_counts_E: Tensor
        self.expert_bias: Tensor | None
        bias = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        # Ranks whose tokens the balancing loss is about, those of the micro-batch or of the global batch; None when
        # this process has all of them.
        self.balance_group: dist.ProcessGroup | None = None

    def forward(self, x_TD: Tensor) -> tuple[ops.Routing, RouterLosses, Tensor]:
        """The third result is x, for the experts: see ``ops.route``."""
        routing, logits_TE, x_TD = ops.route(
            x_TD, self.weight, self.topk, sigmoid=self.sigmoid, normalize=self.normalize,
            selection_bias_E=self.expert_bias,
        )  # fmt: skip
        if self.force_uniform:
            routing = self._uniform(routing)
        counts_E = ops.expert_counts(routing.indices_TK, logits_TE.shape[1])
        losses = RouterLosses(self._balancing_loss(routing.scores_TE, counts_E), router_z_loss(logits_TE))
        if self.training and torch.is_grad_enabled():
            self.step_counts_E += counts_E  # routers are never recomputed, so none is counted twice
            metrics.record("aux_loss", losses.aux_loss)
            metrics.record("z_loss", losses.z_loss)
            metrics.record("router_entropy", mean_entropy(routing.scores_TE.detach()))
        return routing, losses, x_TD

    def _balancing_loss(self, scores_TE: Tensor, counts_E: Tensor) -> Tensor:
        if self.balancing is LoadBalancing.NONE:
            return scores_TE.new_zeros(())
        is_global = self.balancing is LoadBalancing.GLOBAL_AUX_LOSS
        seen_E = counts_E + self.step_counts_E if is_global else counts_E.clone()
        if self.balance_group is not None:
            dist.all_reduce(seen_E, group=self.balance_group)
        return load_balancing_loss(scores_TE, seen_E, seen_E.sum() / self.topk)

    def _uniform(self, routing: ops.Routing) -> ops.Routing:
        """Token t takes experts t*K .. t*K+K-1 (mod E): perfectly even, for benchmarks of everything but the router."""
        num_tokens, num_experts = routing.scores_TE.shape
        slots = torch.arange(num_tokens * self.topk, device=routing.scores_TE.device)
        indices_TK = (slots % num_experts).view(num_tokens, self.topk)
        return ops.Routing(routing.scores_TE.gather(-1, indices_TK), indices_TK, routing.scores_TE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """The bias stays fp32 when the model is cast to bf16: its steps are too small for eight bits."""
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()
        return self

    @torch.no_grad()
    def finish_step(self, global_counts_E: Tensor, bias_update_rate: float | Tensor) -> None:
        """After the optimizer step: moves the expert bias, if there is one, and forgets the step's counts."""
        if self.expert_bias is not None:
            self.expert_bias.copy_(updated_expert_bias(self.expert_bias, global_counts_E, bias_update_rate))
        self.step_counts_E.zero_()
