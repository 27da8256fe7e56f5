"""The specification of every operation, in plain PyTorch: fast kernels must agree in values and gradients.

Shapes: T tokens, K experts chosen per token, E experts, D model width, F inner width of an expert,
N = T*K slots (slot n belongs to token n // K), R <= N slots whose expert is on this rank.
An expert index of -1 marks a slot whose expert lives elsewhere: such a slot contributes nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """What the router decided for each token."""

    weights_TK: Tensor  # fp32, differentiable
    indices_TK: Tensor  # int64, expert of each slot
    scores_TE: Tensor  # fp32, differentiable: softmax or sigmoid of the logits


class ExpertOrder(NamedTuple):
    """Slots in the order in which experts process them."""

    slots_N: Tensor  # int64: slots sorted by expert, stable; the N - R foreign slots come last
    counts_E: Tensor  # int64: slots of each expert; they sum to R


def router_topk(
    logits_TE: Tensor,
    topk: int,
    *,
    sigmoid: bool = False,
    normalize: bool = False,
    selection_bias_E: Tensor | None = None,
) -> Routing:
    """Chooses K experts per token from fp32 logits; scores are a softmax over E or a sigmoid.

    ``selection_bias_E`` shifts the choice only, never the weights (aux-loss-free balancing, arXiv 2408.15664).
    ``normalize`` rescales the K weights of a token to sum to one.
    """
    scores_TE = torch.sigmoid(logits_TE) if sigmoid else torch.softmax(logits_TE, dim=-1)
    choice_TE = scores_TE.detach() if selection_bias_E is None else scores_TE.detach() + selection_bias_E
    indices_TK = choice_TE.topk(topk, dim=-1).indices
    weights_TK = scores_TE.gather(-1, indices_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(weights_TK, indices_TK, scores_TE)


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, int64 [E]; slots marked -1 count for nobody."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices_TK.device)
    expert_N = indices_TK.reshape(-1).to(torch.int64)
    ones_N = torch.ones_like(expert_N)
    counts.scatter_add_(0, torch.where(expert_N < 0, num_experts, expert_N), ones_N)
    return counts[:num_experts]


def sort_slots(indices_TK: Tensor, num_experts: int) -> ExpertOrder:
    """Stable order of slots by expert."""
    expert_N = indices_TK.reshape(-1)
    key_N = torch.where(expert_N < 0, num_experts, expert_N)
    return ExpertOrder(torch.argsort(key_N, stable=True), expert_counts(indices_TK, num_experts))


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows of x, in expert order, each multiplied by its own expert's weight: [R, I] -> [R, O]."""
    groups = torch.split(x_RI, counts_E.tolist())
    return torch.cat([F.linear(x, weight) for x, weight in zip(groups, weight_EOI.unbind(0), strict=True)])


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """silu(gate) * up where the first F columns are the gate: [R, 2F] -> [R, F]. Computed in fp32 (fp64 stays fp64)."""
    gate, up = _at_least_fp32(gate_up_R2F).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_R2F.dtype)


def combine(y_RD: Tensor, order: ExpertOrder, weights_TK: Tensor) -> Tensor:
    """Weighted sum of each token's expert outputs, in slot order and fp32: [R, D] -> [T, D]."""
    num_tokens, topk = weights_TK.shape
    num_slots, num_rows = num_tokens * topk, y_RD.shape[0]
    padded_ND = y_RD.new_zeros(num_slots, y_RD.shape[1]).index_copy(0, order.slots_N[:num_rows], y_RD)
    y_TD = (_at_least_fp32(padded_ND.view(num_tokens, topk, y_RD.shape[1])) * weights_TK.unsqueeze(-1)).sum(dim=1)
    return y_TD.to(y_RD.dtype)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """All SwiGLU experts of a layer on all their tokens: y[t] = sum_k weights[t,k] * expert_{indices[t,k]}(x[t]).

    x_TD and the two expert weights share one floating dtype; weights_TK is fp32; indices_TK is an integer tensor with
    values in [-1, E). No token is dropped; an expert without tokens gets a zero gradient. Returns [T, D] in x's dtype.
    """
    topk = indices_TK.shape[1]
    order = sort_slots(indices_TK, gate_up_E2FD.shape[0])
    num_rows = int(order.counts_E.sum())
    token_R = order.slots_N[:num_rows] // topk
    hidden_R2F = grouped_linear(x_TD[token_R], gate_up_E2FD, order.counts_E)
    y_RD = grouped_linear(swiglu(hidden_R2F), down_EDF, order.counts_E)
    return combine(y_RD, order, weights_TK)
