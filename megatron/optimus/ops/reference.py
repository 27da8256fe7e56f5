"""The specification of every operation, in plain PyTorch: fast kernels must agree in values and gradients.

Shapes: T tokens, K experts chosen per token, E experts, D model width, F inner width of an expert, I and O widths into
and out of a product, N = T*K slots (slot n belongs to token n // K), R <= N slots whose expert is on this rank.
An expert index of -1 marks a foreign slot, one whose expert is on another rank: it has no row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.ops.autograd_guards import is_shape_only

# Scores of a sigmoid underflow to 0, all of a token's, too: 0 divided by their sum would be NaN. The floor is far below
# any score that matters, and far enough above the least normal number that a gradient divided by it stays finite in
# fp32: infinity times a score of 0 would be NaN again.
LEAST_SUM = 1e-20


class Routing(NamedTuple):
    """What the router decided for each token."""

    weights_TK: Tensor  # fp32, differentiable
    indices_TK: Tensor  # int64, expert of each slot
    scores_TE: Tensor  # fp32, differentiable: softmax or sigmoid of the logits


class RouterStatistics(NamedTuple):
    """What losses and metrics need of a router's choice for T tokens."""

    counts_E: Tensor  # int64, slots of each expert
    share_E: Tensor  # mean over tokens of scores / their sum, differentiable in the scores
    z_loss: Tensor  # mean over tokens of logsumexp(logits)^2 (arXiv 2202.08906), differentiable in the logits
    entropy: Tensor  # mean over tokens of that of the shares, in nats, without gradient


class RowOrder(NamedTuple):
    """Rows of slots sorted by expert, stably: those of one expert lie together, experts ascending.

    Foreign slots come last: the rows from R on hold nothing that counts.
    """

    slots_N: Tensor  # slot of each row
    rows_TK: Tensor  # row of each slot, -1 for a foreign slot
    counts_E: Tensor  # rows of each expert; they sum to R


def route(x_TD: Tensor, weight_ED: Tensor, topk: int, **options: Any) -> tuple[Routing, Tensor, Tensor]:
    """Linear router: ``router_topk`` of the logits x @ weight.T, these logits, and x again as third result.

    Where the experts use that third result rather than the argument, x gets a single gradient, dx + dlogits @ weight,
    rounded once.
    """
    logits_TE = router_logits(x_TD, weight_ED)
    return router_topk(logits_TE, topk, **options), logits_TE, x_TD


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits [T, E] of a linear router: products and sums in fp32 (fp64 for fp64), under autocast too."""
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)
    with without_autocast(x_TD.device):
        return F.linear(x_TD.to(wide), weight_ED.to(wide))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


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
    ``normalize`` divides the K weights of a token by their sum, which counts as ``LEAST_SUM`` if it is less. Of equal
    scores the lower expert is taken; NaN counts as the largest, so that it reaches the weights.
    """
    scores_TE = torch.sigmoid(logits_TE) if sigmoid else torch.softmax(logits_TE, dim=-1)
    choice_TE = scores_TE.detach() if selection_bias_E is None else scores_TE.detach() + selection_bias_E
    order_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices  # topk takes any of equal scores
    indices_TK = order_TE[:, :topk].contiguous()
    weights_TK = scores_TE.gather(-1, indices_TK)
    if normalize:
        least = max(LEAST_SUM, torch.finfo(weights_TK.dtype).tiny)  # fp16 knows no smaller normal number
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=least)
    return Routing(weights_TK, indices_TK, scores_TE)


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, int64 [E]; slots marked -1 count for nobody."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices_TK.device)
    expert_N = indices_TK.reshape(-1).to(torch.int64)
    ones_N = torch.ones_like(expert_N)
    counts.scatter_add_(0, torch.where(expert_N == -1, num_experts, expert_N), ones_N)
    return counts[:num_experts]


def router_statistics(logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> RouterStatistics:
    """Mean shares, z-loss and entropy beside the counts; the entropy of equal scores is ln(E), of a single one 0."""
    share_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    z_loss = torch.logsumexp(logits_TE, dim=-1).square().mean()
    entropy = torch.special.entr(share_TE.detach()).sum(dim=-1).mean()
    return RouterStatistics(counts_E, share_TE.mean(dim=0), z_loss, entropy)


def sort_slots(indices_TK: Tensor, num_experts: int) -> RowOrder:
    """Stable order of slots by expert, foreign slots last."""
    expert_N = indices_TK.reshape(-1)
    slots_N = torch.argsort(torch.where(expert_N == -1, num_experts, expert_N), stable=True)
    rows_N = torch.empty_like(slots_N).scatter_(0, slots_N, torch.arange(expert_N.numel(), device=slots_N.device))
    rows_TK = torch.where(expert_N == -1, -1, rows_N).view(indices_TK.shape)
    return RowOrder(slots_N, rows_TK, expert_counts(indices_TK, num_experts))


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    """Each row's token: [T, D] -> [N, D]; zeros in rows of foreign slots."""
    token_N = order.slots_N // order.rows_TK.shape[1]
    local_N = torch.arange(token_N.shape[0], device=x_TD.device) < order.counts_E.sum()
    return torch.where(local_N.unsqueeze(-1), x_TD[token_N], 0.0)


def combine(rows_ND: Tensor, order: RowOrder, weights_TK: Tensor) -> Tensor:
    """Sum of each token's rows times their weights, in slot order and fp32: [N, D] and [T, K] -> [T, D]."""
    local_TK = order.rows_TK >= 0
    picked_TKD = _at_least_fp32(rows_ND)[order.rows_TK.clamp(min=0)]
    local_weights_TK = torch.where(local_TK, weights_TK, 0.0)  # before the product too: its gradient is not 0 * NaN
    terms_TKD = torch.where(local_TK.unsqueeze(-1), picked_TKD * local_weights_TK.unsqueeze(-1), 0.0)
    return terms_TKD.sum(dim=1).to(rows_ND.dtype)


def copy_rows(x_TD: Tensor, positions_TP: Tensor, num_copies: int) -> Tensor:
    """Copies each row to each of its positions (-1: none), 0..num_copies-1, each once: [T, D] -> [num_copies, D]."""
    num_rows, num_positions = positions_TP.shape
    row_TP = torch.arange(num_rows, device=x_TD.device).unsqueeze(1).expand(num_rows, num_positions)
    row_S = row_TP.new_empty(num_copies + 1)  # the last one takes what has no position
    position_TP = torch.where(positions_TP < 0, num_copies, positions_TP).long()
    row_S.scatter_(0, position_TP.reshape(-1), row_TP.reshape(-1))
    return x_TD.index_select(0, row_S[:num_copies])


def sum_copies(y_SD: Tensor, positions_TP: Tensor) -> Tensor:
    """Sum of each row's copies, in the order of P and fp32: [S, D] -> [T, D]. Gradient: ``copy_rows``."""
    wide = torch.promote_types(y_SD.dtype, torch.float32)
    total_TD = y_SD.new_zeros(positions_TP.shape[0], y_SD.shape[1], dtype=wide)
    if y_SD.shape[0] > 0:
        for position_T in positions_TP.unbind(1):
            picked_TD = y_SD.index_select(0, position_T.clamp(min=0))
            total_TD += torch.where((position_T >= 0).unsqueeze(1), picked_TD, 0.0)
    return total_TD.to(y_SD.dtype)


def swiglu(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate) * up where the first F columns are the gate: [N, 2F] -> [N, F]. Computed in fp32 (fp64 stays fp64)."""
    gate, up = _at_least_fp32(gate_up_N2F).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_N2F.dtype)


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    """Rows of x, each multiplied by its own expert's weight: [N, I] -> [N, O]; zeros in rows of foreign slots."""
    groups = _groups(x_NI, order)
    out = torch.cat([F.linear(x, weight) for x, weight in zip(groups, weight_EOI.unbind(0), strict=True)])
    return F.pad(out, (0, 0, 0, x_NI.shape[0] - out.shape[0]))


def grouped_weight_gradient(
    dout_NO: Tensor, x_NI: Tensor, order: RowOrder, buffer: Tensor | None = None, accumulate: bool = True
) -> Tensor:
    """Gradient of ``grouped_linear`` with respect to its weight: [E, O, I], zero for an expert without rows.

    In x's dtype; or added to ``buffer`` in at least fp32, or without ``accumulate`` written over it, and the buffer is
    returned.
    """
    pairs = zip(_groups(_at_least_fp32(dout_NO), order), _groups(_at_least_fp32(x_NI), order), strict=True)
    dweight = torch.stack([dout.T @ x for dout, x in pairs])
    if buffer is None:
        return dweight.to(x_NI.dtype)
    return buffer.copy_(_at_least_fp32(buffer) + dweight if accumulate else dweight)


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """All SwiGLU experts of a layer on all their tokens: y[t] = sum_k weights[t,k] * expert_{indices[t,k]}(x[t]).

    x_TD and the two expert weights share one floating dtype; weights_TK is fp32; indices_TK is an integer tensor with
    values in [-1, E). No token is dropped; an expert without tokens gets a zero gradient. Returns [T, D] in x's dtype.
    """
    order = sort_slots(indices_TK, gate_up_E2FD.shape[0])
    activation_NF = swiglu(grouped_linear(gather_rows(x_TD, order), gate_up_E2FD, order))
    return combine(grouped_linear(activation_NF, down_EDF, order), order, weights_TK)


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``moe_mlp``, and what its backward needs beside the arguments: nothing. See ``fused_moe.MoeKernels``."""
    return moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK), []


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, RowOrder]]:
    """The first half of the backward, see ``fused_moe.MoeKernels``. Computes the forward again."""
    x_TD, weights_TK = (arguments[i].detach().requires_grad_() for i in (0, 3))
    gate_up_E2FD, down_EDF = (arguments[i].detach() for i in (1, 2))
    order = sort_slots(arguments[4], gate_up_E2FD.shape[0])
    with torch.enable_grad():
        x_ND = gather_rows(x_TD, order)
        hidden_N2F = grouped_linear(x_ND, gate_up_E2FD, order)
        activation_NF = swiglu(hidden_N2F)
        y_ND = grouped_linear(activation_NF, down_EDF, order)
        y_TD = combine(y_ND, order, weights_TK)
    leaves = (x_TD, weights_TK, hidden_N2F, y_ND)
    dx, dweights, dhidden_N2F, dy_ND = torch.autograd.grad(y_TD, leaves, dy_TD)
    ddown = grouped_weight_gradient(dy_ND, activation_NF.detach(), order, down_buffer, accumulate)
    return dx, ddown if down_buffer is None else None, dweights, (dhidden_N2F, x_ND.detach(), order)


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: tuple[Tensor, Tensor, RowOrder],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """The second half of the backward, see ``fused_moe.MoeKernels``."""
    dgate_up_E2FD = grouped_weight_gradient(*pending, gate_up_buffer, accumulate)
    return dgate_up_E2FD if gate_up_buffer is None else None


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _groups(rows_N: Tensor, order: RowOrder) -> tuple[Tensor, ...]:
    """The rows of each expert. Only here are counts read on the host: every expert is a product of its own."""
    if is_shape_only(order.counts_E):  # then any counts do for shapes
        counts = [rows_N.shape[0], *[0] * (order.counts_E.shape[0] - 1)]
    else:
        counts = order.counts_E.tolist()
    return rows_N[: sum(counts)].split(counts)


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (i, i + d/2) of every head by its position's angle, in fp32, rounded once.

    cos and sin, fp32 [S, d] or [B, 1, S, d], hold each angle twice, d/2 apart.
    """
    x = x_BHSd.to(torch.promote_types(x_BHSd.dtype, torch.float32))
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x_BHSd.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def log_sum_exp(logits_CV: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row, in fp32: [C, V] -> [C]."""
    return torch.logsumexp(logits_CV.float(), dim=-1)


def cross_entropy_gradient_(
    logits_CV: Tensor, lse_C: Tensor, columns_C: Tensor, here_C: Tensor, valid_C: Tensor, z_loss_coeff: float
) -> Tensor:
    """Gradient of the summed cross-entropy and z-loss with respect to the logits [C, V].

    exp(logits - lse) * (1 + 2 z_loss_coeff lse), minus 1 at ``columns_C`` in the rows that are ``here_C``, and zero in
    rows that are not ``valid_C``: in fp32, rounded once to the logits' dtype. fp32 logits are overwritten.
    """
    grad_CV = logits_CV.float().sub_(lse_C[:, None]).exp_()
    if z_loss_coeff:
        grad_CV.mul_((1.0 + 2.0 * z_loss_coeff * lse_C)[:, None])
    # One element a row: no two writes meet, so the result does not depend on their order.
    grad_CV.scatter_(1, columns_C[:, None], grad_CV.gather(1, columns_C[:, None]) - here_C[:, None].float())
    return grad_CV.mul_(valid_C[:, None]).to(logits_CV.dtype)
