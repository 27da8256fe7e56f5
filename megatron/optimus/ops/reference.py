"""The specification of every operation, in plain PyTorch: fast kernels must agree in values and gradients.

Shapes: T tokens, K experts chosen per token, E experts, D model width, F inner width of an expert, I and O widths into
and out of a product, N = T*K slots (slot n belongs to token n // K), R <= N slots whose expert is on this rank,
P >= N rows of a buffer of rows. An expert index of -1 marks a slot whose expert lives elsewhere: it has no row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.optimus.ops.shapes_only import lacks_values

# Scores of a sigmoid underflow to 0, all of a token's, too: 0 divided by their sum would be NaN. The floor is far below
# any score that matters, and far enough above the least normal number that a gradient divided by it stays finite in
# fp32: infinity times a score of 0 would be NaN again.
LEAST_SUM = 1e-20


class Routing(NamedTuple):
    """What the router decided for each token."""

    weights_TK: Tensor  # fp32, differentiable
    indices_TK: Tensor  # int64, expert of each slot
    scores_TE: Tensor  # fp32, differentiable: softmax or sigmoid of the logits


class RowOrder(NamedTuple):
    """Where each slot's row is, all int32 on the device of the indices.

    A buffer of rows has P = ``slots_P.numel()`` rows; those of one expert lie together, experts ascending, slots of an
    expert in their order. Rows of no local slot hold nothing that counts: no operation's result for a slot, token or
    expert depends on them, and gradients never flow through them.
    """

    slots_P: Tensor  # slot of each row; -1 or a foreign slot where the row belongs to no local slot
    rows_TK: Tensor  # row of each slot, -1 for a foreign slot
    counts_E: Tensor  # rows of each expert; they sum to R
    plan: list[Tensor]  # what the backend that made the order needs besides. Here, in csrc/cpu and in csrc/sycl:
    # offsets [E+3], first row of each expert, then R, then N twice. In Triton: see ops/triton/index.py

    @classmethod
    def of(cls, tensors: list[Tensor]) -> RowOrder:
        """From ``tensors()``, the one list as which an order goes to an operation."""
        return cls(tensors[0], tensors[1], tensors[2], tensors[3:])

    def tensors(self) -> list[Tensor]:
        return [self.slots_P, self.rows_TK, self.counts_E, *self.plan]

    @property
    def rows_N(self) -> Tensor:
        return self.rows_TK.view(-1)


def route(x_TD: Tensor, weight_ED: Tensor, topk: int, **options: Any) -> tuple[Routing, Tensor, Tensor]:
    """``router_topk`` of a linear router's logits, these logits, and x, for what else is to be done with the tokens.

    Whoever uses that x rather than the argument gets one gradient of both, dx + dlogits @ weight, rounded once.
    """
    logits_TE = router_logits(x_TD, weight_ED)
    return router_topk(logits_TE, topk, **options), logits_TE, x_TD


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Logits [T, E] of a linear router, products and sums in fp32, of fp64 in fp64, under autocast, too."""
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)
    with without_autocast(x_TD.device):
        return F.linear(x_TD.to(wide), weight_ED.to(wide))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In it products on the device keep their factors' dtype."""
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


def sort_slots(indices_TK: Tensor, num_experts: int) -> RowOrder:
    """Stable order of slots by expert, foreign slots last: P = N rows, of which the first R belong to local slots."""
    expert_N = indices_TK.reshape(-1)
    num_slots = expert_N.numel()
    counts_E = expert_counts(indices_TK, num_experts)
    slots_P = torch.argsort(torch.where(expert_N == -1, num_experts, expert_N), stable=True)
    rows_N = torch.empty_like(slots_P).scatter_(0, slots_P, torch.arange(num_slots, device=slots_P.device))
    offsets = F.pad(counts_E.cumsum(0), (1, 2))
    offsets[num_experts + 1 :] = num_slots
    rows_TK = torch.where(expert_N == -1, -1, rows_N).view(indices_TK.shape)
    return RowOrder(slots_P.int(), rows_TK.int(), counts_E.int(), [offsets.int()])


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    """Each row's token: [T, D] -> [P, D]; zeros in rows of no local slot. Gradient: ``combine`` with ones."""
    token_P = order.slots_P.long() // order.rows_TK.shape[1]
    local_P = torch.arange(token_P.shape[0], device=x_TD.device) < order.counts_E.sum()
    return torch.where(local_P.unsqueeze(-1), x_TD[token_P], 0.0)


def combine(rows_PD: Tensor, order: RowOrder, weights_TK: Tensor) -> Tensor:
    """Sum of each token's rows times their weights, in slot order and fp32: [P, D] and [T, K] -> [T, D]."""
    row_TK, local_TK = order.rows_TK.long(), order.rows_TK >= 0
    picked_TKD = _at_least_fp32(rows_PD)[row_TK.clamp(min=0)]
    local_weights_TK = torch.where(local_TK, weights_TK, 0.0)  # before the product too: its gradient is not 0 * NaN
    terms_TKD = torch.where(local_TK.unsqueeze(-1), picked_TKD * local_weights_TK.unsqueeze(-1), 0.0)
    return terms_TKD.sum(dim=1).to(rows_PD.dtype)


def copy_rows(x_TD: Tensor, positions_TP: Tensor, num_copies: int) -> Tensor:
    """Each row at each of its positions (-1: none), which are 0..num_copies-1, each once: [T, D] -> [num_copies, D]."""
    num_rows, num_places = positions_TP.shape
    row_TP = torch.arange(num_rows, device=x_TD.device).unsqueeze(1).expand(num_rows, num_places)
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


def swiglu(gate_up_P2F: Tensor) -> Tensor:
    """silu(gate) * up where the first F columns are the gate: [P, 2F] -> [P, F]. Computed in fp32 (fp64 stays fp64)."""
    gate, up = _at_least_fp32(gate_up_P2F).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_P2F.dtype)


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, order: RowOrder, main_grad: Tensor | None = None) -> Tensor:
    """Rows of x, each multiplied by its own expert's weight: [P, I] -> [P, O].

    With ``main_grad`` [E, O, I] (fp32 or the weight's dtype), the gradient of the weight is added to that buffer in at
    least fp32 when the backward runs, and the weight itself receives none.
    """
    if main_grad is not None:
        return _LinearIntoMainGradient.apply(x_PI, weight_EOI, main_grad, order)
    groups = _groups(x_PI, order)
    out = torch.cat([F.linear(x, weight) for x, weight in zip(groups, weight_EOI.unbind(0), strict=True)])
    return F.pad(out, (0, 0, 0, x_PI.shape[0] - out.shape[0]))


def grouped_linear_swiglu(
    x_PD: Tensor, gate_up_E2FD: Tensor, order: RowOrder, main_grad: Tensor | None = None
) -> Tensor:
    """``swiglu`` of ``grouped_linear``: the up projection of the experts, [P, D] -> [P, F]."""
    return swiglu(grouped_linear(x_PD, gate_up_E2FD, order, main_grad))


def grouped_input_gradient(dout_PO: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    """Gradient of ``grouped_linear`` with respect to x: [P, O] -> [P, I]."""
    groups = _groups(dout_PO, order)
    dx = torch.cat([dout @ weight for dout, weight in zip(groups, weight_EOI.unbind(0), strict=True)])
    return F.pad(dx, (0, 0, 0, dout_PO.shape[0] - dx.shape[0]))


def grouped_weight_gradient(
    dout_PO: Tensor, x_PI: Tensor, order: RowOrder, main_grad: Tensor | None = None, accumulate: bool = True
) -> Tensor:
    """Gradient of ``grouped_linear`` with respect to its weight: [E, O, I] in x's dtype, zero for an expert without
    rows; or added to ``main_grad`` in at least fp32, which is then returned, or written over what is there if not
    ``accumulate``."""
    pairs = zip(_groups(_at_least_fp32(dout_PO), order), _groups(_at_least_fp32(x_PI), order), strict=True)
    dweight = torch.stack([dout.T @ x for dout, x in pairs])
    if main_grad is None:
        return dweight.to(x_PI.dtype)
    return main_grad.copy_(_at_least_fp32(main_grad) + dweight if accumulate else dweight)


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """All SwiGLU experts of a layer on all their tokens: y[t] = sum_k weights[t,k] * expert_{indices[t,k]}(x[t]).

    x_TD and the two expert weights share one floating dtype; weights_TK is fp32; indices_TK is an integer tensor with
    values in [-1, E). No token is dropped; an expert without tokens gets a zero gradient. Returns [T, D] in x's dtype.
    """
    order = sort_slots(indices_TK, gate_up_E2FD.shape[0])
    activation_PF = grouped_linear_swiglu(gather_rows(x_TD, order), gate_up_E2FD, order)
    return combine(grouped_linear(activation_PF, down_EDF, order), order, weights_TK)


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``moe_mlp`` and what its backward needs beside the arguments: nothing."""
    return moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK), []


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, RowOrder]]:
    """See ``main_grads.FusedMoE``. Computes the forward again."""
    x_TD, weights_TK = (arguments[place].detach().requires_grad_() for place in (0, 3))
    gate_up_E2FD, down_EDF = (arguments[place].detach() for place in (1, 2))
    order = sort_slots(arguments[4], gate_up_E2FD.shape[0])
    with torch.enable_grad():
        x_PD = gather_rows(x_TD, order)
        hidden_P2F = grouped_linear(x_PD, gate_up_E2FD, order)
        activation_PF = swiglu(hidden_P2F)
        y_PD = grouped_linear(activation_PF, down_EDF, order)
        y_TD = combine(y_PD, order, weights_TK)
    leaves = (x_TD, weights_TK, hidden_P2F, y_PD)
    dx, dweights, dhidden_P2F, dy_PD = torch.autograd.grad(y_TD, leaves, dy_TD)
    ddown = grouped_weight_gradient(dy_PD, activation_PF.detach(), order, down_buffer, accumulate)
    return dx, ddown if down_buffer is None else None, dweights, (dhidden_P2F, x_PD.detach(), order)


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: tuple[Tensor, Tensor, RowOrder],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``main_grads.FusedMoE``."""
    dgate_up_E2FD = grouped_weight_gradient(*pending, gate_up_buffer, accumulate)
    return dgate_up_E2FD if gate_up_buffer is None else None


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _groups(rows_P: Tensor, order: RowOrder) -> tuple[Tensor, ...]:
    """The rows of each expert. Only here are counts read on the host: every expert is a product of its own."""
    if lacks_values(order.counts_E):  # then any counts do for shapes
        counts = [rows_P.shape[0], *[0] * (order.counts_E.shape[0] - 1)]
    else:
        counts = order.counts_E.tolist()
    return rows_P[: sum(counts)].split(counts)


class _LinearIntoMainGradient(torch.autograd.Function):
    """``grouped_linear`` whose weight gradient is added to a buffer before it is rounded to the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.order = main_grad, order  # not saved: other micro-batches change main_grad in between
        return grouped_linear(x, weight, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            grouped_weight_gradient(grads[0], x, ctx.order, ctx.main_grad)
        return grouped_input_gradient(grads[0], weight, ctx.order), None, None, None


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + d/2) of every head turned by its position's angle, in fp32 and rounded once. cos and sin, fp32
    [S, d] or [B, 1, S, d], have each angle twice, d/2 apart."""
    x = x_BHSd.to(torch.promote_types(x_BHSd.dtype, torch.float32))
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x_BHSd.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def log_sum_exp(logits_CV: Tensor) -> Tensor:
    """Of each row, in fp32."""
    return torch.logsumexp(logits_CV.float(), dim=-1)


def cross_entropy_gradient_(
    logits_CV: Tensor, lse_C: Tensor, columns_C: Tensor, here_C: Tensor, valid_C: Tensor, z_loss_coeff: float
) -> Tensor:
    """exp(logits - lse) * (1 + 2 z_loss_coeff lse), less 1 in ``columns_C`` of the rows that are ``here_C``, zero in
    rows that are not ``valid_C``: in fp32, rounded once to the logits' dtype. fp32 logits are overwritten."""
    grad_CV = logits_CV.float().sub_(lse_C[:, None]).exp_()
    if z_loss_coeff:
        grad_CV.mul_((1.0 + 2.0 * z_loss_coeff * lse_C)[:, None])
    # One element a row: no two writes meet, so the result does not depend on their order.
    grad_CV.scatter_(1, columns_C[:, None], grad_CV.gather(1, columns_C[:, None]) - here_C[:, None].float())
    return grad_CV.mul_(valid_C[:, None]).to(logits_CV.dtype)
