"""The C++ operations (csrc/cpu) as the backends' common set of kernels, and ``moe_mlp`` with its gradient and shapes.

Import after the compiled library is loaded. The kernels take contiguous tensors that grouped.py has checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops.forward_mode import reverse_mode_only
from megatron.optimus.ops.main_grads import keep_for_backward
from megatron.optimus.ops.reference import RowOrder
from megatron.optimus.ops.second_derivatives import refuse

_C = torch.ops.optimus
_OP = "optimus::moe_mlp"


def instruction_sets() -> list[str]:
    """The instruction sets that this processor has and the products have kernels for, fastest first.

    Of amx (fp32 as a sum of bf16 parts, see docs/design/expert_kernels.md), avx512, avx2 and plain.
    """
    return _C.cpu_instruction_sets().split(",")


def use_instructions(name: str | None) -> None:
    """Makes all later products of the process use an instruction set, to test or to compare it; None: the fastest.

    Raises ValueError for one that is not there.
    """
    _C.cpu_use_instructions(name or "")


def order_sizes(num_slots: int, num_experts: int) -> list[int]:
    """Elements of an order's tensors: slots, rows, counts, offsets."""
    return [num_slots, num_slots, num_experts, num_experts + 3]


def sort_slots(indices_TK: Tensor, num_experts: int) -> RowOrder:
    slots, rows, counts, offsets = _C.cpu_sort_slots(indices_TK, num_experts)
    return RowOrder(slots, rows.view(indices_TK.shape), counts, [offsets])


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    return _C.cpu_sort_slots(indices_TK, num_experts)[2].long()


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    return _C.cpu_gather_rows(x_TD, order.slots_P, order.plan[0])


def combine(rows_PD: Tensor, order: RowOrder, weights_TK: Tensor | None, num_tokens: int) -> Tensor:
    return _C.cpu_combine(rows_PD, order.rows_N, order.plan[0], weights_TK, num_tokens)


def sum_copies(y_SD: Tensor, positions_TP: Tensor) -> Tensor:
    num_places = positions_TP.numel()
    offsets = torch.tensor([0, y_SD.shape[0], num_places, num_places], dtype=torch.int32)  # as of a single expert
    return _C.cpu_combine(y_SD, positions_TP.view(-1), offsets, None, positions_TP.shape[0])


def combine_backward(dy_TD: Tensor, rows_PD: Tensor, order: RowOrder, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    return _C.cpu_combine_backward(dy_TD, rows_PD, order.slots_P, order.plan[0], weights_TK)


def swiglu(hidden_P2F: Tensor, order: RowOrder) -> Tensor:
    return _C.cpu_swiglu(hidden_P2F, order.plan[0])


def swiglu_gradient(hidden_P2F: Tensor, grad_PF: Tensor, order: RowOrder) -> Tensor:
    return _C.cpu_swiglu_backward(hidden_P2F, grad_PF, order.plan[0])


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    return _C.cpu_grouped_linear(x_PI, weight_EOI, order.plan[0], True)


def grouped_linear_swiglu(x_PD: Tensor, gate_up_E2FD: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    return _C.cpu_grouped_linear_swiglu(x_PD, gate_up_E2FD, order.plan[0])


def grouped_input_gradient(dout_PO: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    return _C.cpu_grouped_linear(dout_PO, weight_EOI, order.plan[0], False)


def grouped_weight_gradient(
    dout_PO: Tensor, x_PI: Tensor, order: RowOrder, main_grad: Tensor | None, accumulate: bool
) -> Tensor:
    out = main_grad
    if out is None:
        out = x_PI.new_empty(order.counts_E.shape[0], dout_PO.shape[1], x_PI.shape[1])
    _C.cpu_grouped_weight_gradient(dout_PO, x_PI, order.plan[0], out, main_grad is not None and accumulate)
    return out


def router_topk(
    logits_TE: Tensor, topk: int, sigmoid: bool, normalize: bool, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _C.cpu_router_topk(logits_TE, topk, sigmoid, normalize, bias_E)


def router_topk_backward(
    scores_TE: Tensor, indices_TK: Tensor, dweights_TK: Tensor, dscores: Tensor | None, sigmoid: bool, normalize: bool
) -> Tensor:
    dscores_TE = torch.zeros_like(scores_TE) if dscores is None else dscores
    return _C.cpu_router_topk_backward(scores_TE, indices_TK, dweights_TK, dscores_TE, sigmoid, normalize)


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in C++. Saves its arguments and the hidden rows [T*K, 2F] before SwiGLU."""
    return _C.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)[0]


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    y, hidden = _C.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    return y, [hidden]


def moe_mlp_backward(
    dy_TD: Tensor,
    arguments: list[Tensor],
    saved: list[Tensor],
    buffers: tuple[Tensor | None, Tensor | None],
    accumulate: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """See ``main_grads.FusedMoE``."""
    weights = arguments[1:3]
    outs = [w.new_empty(w.shape) if b is None else b for w, b in zip(weights, buffers, strict=True)]
    adds = [b is not None and a for b, a in zip(buffers, accumulate, strict=True)]
    dx, dweights = _C.moe_mlp_backward_into(dy_TD, *arguments, *saved, *outs, *adds)
    dgate_up, ddown = (out if b is None else None for out, b in zip(outs, buffers, strict=True))
    return dx, dgate_up, ddown, dweights


@torch.library.register_fake(_OP)
def _fake(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(indices.numel(), gate_up.shape[1])


@torch.library.register_fake("optimus::cpu_combine")
def _fake_combine(
    rows: Tensor, row_of_slot: Tensor, offsets: Tensor, weights: Tensor | None, num_tokens: int
) -> Tensor:
    return rows.new_empty(num_tokens, rows.shape[1])


@torch.library.register_fake("optimus::moe_mlp_backward_into")
def _fake_backward_into(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor, hidden: Tensor,
    dgate_up: Tensor, ddown: Tensor, add_gate_up: bool, add_down: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


@torch.library.register_fake("optimus::moe_mlp_backward")
def _fake_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        gate_up.new_empty(gate_up.shape),
        down.new_empty(down.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    keep_for_backward(ctx, inputs, output[1:])


@reverse_mode_only("moe_mlp")
def _backward(ctx: Any, dy: Tensor | None, _dhidden: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, gate_up, down, weights, indices, hidden = ctx.saved_tensors
    grads = _C.moe_mlp_backward(dy, x, gate_up, down, weights, indices, hidden)
    return (*grads, None)


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
refuse(f"{_OP}_backward")
