"""The router chooses each token's experts and weights; its losses and the expert bias keep the load of experts even.

Shapes: T tokens, D model width, E experts, K experts per token. Counts are slots per expert: a token takes K of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ScoreFunction
from megatron.optimus.platform import metrics


def load_balancing_loss(share_E: Tensor, counts_E: Tensor, num_tokens: Tensor | int) -> Tensor:
    """The auxiliary load-balancing loss E * sum_e f_e * P_e (arXiv 2101.03961).

    f_e = counts_E / num_tokens is the share of tokens that chose expert e, taken as a constant. The scale is that of
    Hugging Face's OLMoE: K where the load is perfectly balanced.

    Args:
        share_E: P, fp32: the mean score of each expert over the tokens; scores that do not sum to one (sigmoid) are
            normalised per token first (``ops.router_statistics``).
        counts_E: slots per expert, of these tokens or of more (the whole global batch).
        num_tokens: the tokens that ``counts_E`` counts.

    Returns:
        The loss, fp32 scalar, differentiable in ``share_E``.
    """
    return share_E.shape[0] * torch.dot(counts_E.to(share_E.dtype) / num_tokens, share_E)


def updated_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float | Tensor) -> Tensor:
    """The expert bias after one step of aux-loss-free balancing (arXiv 2408.15664).

    The bias of experts with less than the mean load rises by ``rate``, that of the others falls by it.
    """
    load_E = counts_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(load_E.mean() - load_E)


class RouterLosses(NamedTuple):
    """Auxiliary losses of one router over one micro-batch: differentiable fp32 scalars, before their weights."""

    aux_loss: Tensor  # load balancing
    z_loss: Tensor


class Router(nn.Module):
    """Linear router with top-K choice; logits, scores, weights and losses in fp32."""

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
        # Ranks whose tokens the balancing loss counts, those of the micro-batch or of the global batch; None where
        # this process has all of them.
        self.balance_group: dist.ProcessGroup | None = None

    def forward(self, x_TD: Tensor) -> tuple[ops.Routing, RouterLosses, Tensor]:
        """Routes tokens.

        Args:
            x_TD: tokens, in the model's dtype.

        Returns:
            Routing, auxiliary losses, and x for the experts, so that both uses share one gradient (``ops.route``).
        """
        routing, logits_TE, x_TD = ops.route(
            x_TD, self.weight, self.topk, sigmoid=self.sigmoid, normalize=self.normalize,
            selection_bias_E=self.expert_bias,
        )  # fmt: skip
        if self.force_uniform:
            routing = self._uniform(routing)
        statistics = ops.router_statistics(logits_TE, routing.scores_TE, routing.indices_TK)
        losses = RouterLosses(self._balancing_loss(statistics), statistics.z_loss)
        if self.training and torch.is_grad_enabled():
            self.step_counts_E += statistics.counts_E  # routers are never recomputed, so none is counted twice
            metrics.record("aux_loss", losses.aux_loss)
            metrics.record("z_loss", losses.z_loss)
            metrics.record("router_entropy", statistics.entropy)
        return routing, losses, x_TD

    def _balancing_loss(self, statistics: ops.RouterStatistics) -> Tensor:
        counts_E = statistics.counts_E
        if self.balancing is LoadBalancing.NONE:
            return statistics.share_E.new_zeros(())
        is_global = self.balancing is LoadBalancing.GLOBAL_AUX_LOSS
        seen_E = counts_E + self.step_counts_E if is_global else counts_E.clone()
        if self.balance_group is not None:
            dist.all_reduce(seen_E, group=self.balance_group)
        return load_balancing_loss(statistics.share_E, seen_E, seen_E.sum() / self.topk)

    def _uniform(self, routing: ops.Routing) -> ops.Routing:
        """Token t takes experts t*K to t*K+K-1 (mod E): perfectly even, for benchmarks of all but the router."""
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
        """Updates the expert bias, if there is one, and resets the step's counts; to be called after each step.

        Args:
            global_counts_E: int64 [E], slots per expert over the global batch.
            bias_update_rate: step size of the bias.
        """
        if self.expert_bias is not None:
            self.expert_bias.copy_(updated_expert_bias(self.expert_bias, global_counts_E, bias_update_rate))
        self.step_counts_E.zero_()
