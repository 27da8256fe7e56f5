"""The expert layer with float8 products, and its specification on the CPU (ops/fp8.py says what is rounded how).

Shapes: T tokens, K experts per token, E experts, D model width, F inner width, N rows (slots in expert order).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import refuse_tangents
from megatron.optimus.ops.fp8 import ALIGNMENT, FORWARD, GRADIENT, quantize
from megatron.optimus.ops.fused_moe import InputGradients, MoeMlpFunction, check_arguments
from megatron.optimus.ops.fused_moe import moe_mlp as exact_moe_mlp
from megatron.optimus.ops.main_grads import MainGrad


def moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    main_grads: tuple[MainGrad | None, MainGrad | None] = (None, None),
    on_input_gradients: InputGradients | None = None,
) -> Tensor:
    """``fused_moe.moe_mlp`` with float8 products; arguments, result and errors are the same.

    Args:
        x_TD: bf16 (CPU: any floating); D and F are multiples of ALIGNMENT.
        gate_up_E2FD: of x's dtype, as the others.
        down_EDF: likewise.
        weights_TK: fp32.
        indices_TK: int32 or int64 in [-1, E).
        main_grads: as in ``fused_moe.moe_mlp``.
        on_input_gradients: likewise.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a width is no multiple of ALIGNMENT.
        RuntimeError: forward-mode AD.
    """
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    check_arguments(*arguments)
    refuse_tangents("fp8.moe_mlp", *arguments)
    width, inner = down_EDF.shape[1:]
    if width % ALIGNMENT or inner % ALIGNMENT:
        raise ValueError(f"fp8: experts of widths {width} and {inner}; both must be multiples of {ALIGNMENT}")
    if x_TD.shape[0] == 0:
        return exact_moe_mlp(*arguments, main_grads, on_input_gradients)  # no row to take a scale from
    kernels: Any = sys.modules[__name__]
    if x_TD.is_cuda:
        from megatron.optimus.ops.triton import fp8_experts as kernels
    y: Tensor = MoeMlpFunction.apply(*arguments, kernels, main_grads, on_input_gradients)
    return y


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as float8 holds it with one scale, in fp32."""
    found = quantize([x.reshape(-1, x.shape[-1])], dtype)
    return (found.rows.float() * found.scale).view(x.shape)


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``."""
    order = reference.sort_slots(indices_TK, down_EDF.shape[0])
    x_ND = reference.gather_rows(_rounded(x_TD, FORWARD), order)
    gate_up, down = _rounded(gate_up_E2FD, FORWARD), _rounded(down_EDF, FORWARD)
    hidden_N2F = reference.grouped_linear(x_ND, gate_up, order).to(x_TD.dtype)
    activation_NF = _rounded(reference.swiglu(hidden_N2F.float()), FORWARD)
    y_ND = reference.grouped_linear(activation_NF, down, order).to(x_TD.dtype)
    return reference.combine(y_ND, order, weights_TK), [hidden_N2F]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, reference.RowOrder]]:
    """See ``fused_moe.MoeKernels``."""
    x_TD, gate_up, down, weights_TK, indices = arguments
    gate_up, down_EFD = _rounded(gate_up, FORWARD), _rounded(down, FORWARD).transpose(1, 2)
    order = reference.sort_slots(indices, down.shape[0])
    is_local_N1 = (torch.arange(indices.numel(), device=indices.device) < order.counts_E.sum())[:, None]
    weight_N1 = torch.where(is_local_N1, weights_TK.reshape(-1, 1)[order.slots_N], 0.0)
    dy_ND = reference.gather_rows(_rounded(dy_TD, GRADIENT), order)
    grad_NF = reference.grouped_linear(dy_ND, down_EFD.contiguous(), order).to(dy_TD.dtype).float()
    hidden_N2F = saved[0].detach().float().requires_grad_()
    with torch.enable_grad():
        activation_NF = reference.swiglu(hidden_N2F)
    [dhidden_N2F] = torch.autograd.grad(activation_NF, hidden_N2F, grad_NF * weight_N1)
    activation_NF, dhidden_N2F = activation_NF.detach(), _rounded(dhidden_N2F, GRADIENT)
    row_sums_N = (grad_NF * activation_NF).sum(1)
    dweights = torch.where(order.rows_TK >= 0, row_sums_N[order.rows_TK.clamp(min=0)], 0.0)
    dx_ND = reference.grouped_linear(dhidden_N2F, gate_up.transpose(1, 2).contiguous(), order).to(dy_TD.dtype)
    dx = reference.combine(dx_ND, order, torch.ones_like(weights_TK))
    weighted_NF = _rounded(weight_N1 * activation_NF, FORWARD)
    ddown = reference.grouped_weight_gradient(dy_ND, weighted_NF, order, down_buffer, accumulate)
    x_ND = reference.gather_rows(_rounded(x_TD, FORWARD), order)
    return dx, ddown.to(down.dtype) if down_buffer is None else None, dweights, (dhidden_N2F, x_ND, order)


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: tuple[Tensor, Tensor, reference.RowOrder],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``fused_moe.MoeKernels``."""
    gradient = reference.grouped_weight_gradient(*pending, gate_up_buffer, accumulate)
    return gradient.to(arguments[1].dtype) if gate_up_buffer is None else None
