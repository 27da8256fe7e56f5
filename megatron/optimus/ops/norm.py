"""RMSNorm, alone, with the sum before it and with the rotary embedding behind it; statistics in fp32 always.

On GPUs each is one Triton kernel a direction. torch's own takes one block of threads a row: with rows of one head, 64
elements, norms took a quarter of a step. Elsewhere they are plain PyTorch.

Shapes: B sequences, S positions, H heads, d head width, W the weight's width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import first_derivative_only, refuse_tangents, reverse_mode_only
from megatron.optimus.ops.elementwise import check_device, check_tables, runs_triton


def rms_norm(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        x: floating [..., W].
        weight_W: the scale of each element, floating.
        eps: added to the mean of squares.

    Returns:
        [..., W] in x's dtype, rounded once.

    Raises:
        ValueError: the widths differ, or the weight is on another device.
    """
    if x.dim() == 0 or x.shape[-1:] != weight_W.shape:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight_W.shape)}; expected [..., W] and [W]")
    check_device("rms_norm", x, weight_W)
    if _kernels_for(x, weight_W) is None:
        return F.rms_norm(x, weight_W.shape, weight_W, eps)
    refuse_tangents("rms_norm", x, weight_W)
    return _RmsNorm.apply(x, weight_W, eps)


def add_rms_norm(x: Tensor, y: Tensor | None, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream behind a sublayer, and the input of the next one: x + y and ``rms_norm`` of it.

    In the backward the gradient that comes along the residual is added where that of the norm is computed.

    Args:
        x: floating [..., W].
        y: the sublayer's output, of x's shape and dtype; None: nothing is added.
        weight_W: as for ``rms_norm``.
        eps: likewise.

    Returns:
        The sum, or a view of x, and the norm of the rounded sum; both [..., W] in x's dtype.

    Raises:
        ValueError: as ``rms_norm``, or y has another shape, dtype or device.
    """
    if y is not None and (x.shape != y.shape or x.dtype != y.dtype):
        raise ValueError(f"add_rms_norm: x {x.dtype} {tuple(x.shape)} and y {y.dtype} {tuple(y.shape)} differ")
    if x.dim() == 0 or x.shape[-1:] != weight_W.shape:
        raise ValueError(
            f"add_rms_norm: x {tuple(x.shape)} and weight {tuple(weight_W.shape)}; expected [..., W] and [W]"
        )
    check_device("add_rms_norm", x, weight_W, *(() if y is None else (y,)))
    if _kernels_for(x, weight_W) is None:
        x = x if y is None else x + y
        return x, F.rms_norm(x, weight_W.shape, weight_W, eps)
    refuse_tangents("add_rms_norm", x, y, weight_W)
    return _AddRmsNorm.apply(x, y, weight_W, eps)


def norm_rotate(x_BSHd: Tensor, weight_W: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm of queries or keys, then the rotary embedding.

    Args:
        x_BSHd: as a projection leaves them.
        weight_W: the norm's scale, [d] for a norm over each head, [H * d] for one over all heads of a position.
        eps: added to the mean of squares.
        cos: fp32 [S, d] or [B, 1, S, d], both halves of d alike, without gradient.
        sin: likewise.

    Returns:
        [B, H, S, d] in x's dtype; in memory positions come before heads.

    Raises:
        ValueError: x, the weight or a table do not fit each other or are on another device.
    """
    batch, length, heads, width = x_BSHd.shape if x_BSHd.dim() == 4 else (0, 0, 0, 0)
    if not width or weight_W.dim() != 1 or len(weight_W) not in (width, heads * width):
        raise ValueError(
            f"norm_rotate: x {tuple(x_BSHd.shape)} and weight {tuple(weight_W.shape)}; expected [B, S, H, d] and "
            "[d] or [H * d]"
        )
    check_tables("norm_rotate", (batch, heads, length, width), cos, sin)
    check_device("norm_rotate", x_BSHd, weight_W, cos, sin)
    if _kernels_for(x_BSHd, weight_W) is None:
        rows = x_BSHd if len(weight_W) == width else x_BSHd.flatten(-2)
        normed = F.rms_norm(rows, weight_W.shape, weight_W, eps).view(x_BSHd.shape)
        return reference.rotate(normed.transpose(1, 2), cos, sin)
    refuse_tangents("norm_rotate", x_BSHd, weight_W, cos, sin)
    return _NormRotate.apply(x_BSHd, weight_W, eps, cos, sin)


def _kernels_for(x: Tensor, weight_W: Tensor) -> ModuleType | None:
    if not runs_triton(x):
        return None
    from megatron.optimus.ops.triton import norm

    return norm if len(weight_W) <= norm.MAX_WIDTH else None


def _rows(x: Tensor, weight_W: Tensor) -> Tensor:
    return x.reshape(-1, len(weight_W)).contiguous()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
        from megatron.optimus.ops.triton import norm

        ctx.save_for_backward(x, weight_W)
        ctx.eps = eps
        _, normed_NW = norm.add_rms_norm(_rows(x, weight_W), None, weight_W, eps)
        return normed_NW.view(x.shape)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("rms_norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from megatron.optimus.ops.triton import norm

        x, weight_W = ctx.saved_tensors
        dx, dweight = norm.rms_norm_backward(_rows(x, weight_W), weight_W, _rows(grad, weight_W), None, ctx.eps)
        return dx.view(x.shape), dweight, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from megatron.optimus.ops.triton import norm

        y_NW = None if y is None else _rows(y, weight_W)
        total_NW, normed_NW = norm.add_rms_norm(_rows(x, weight_W), y_NW, weight_W, eps)
        total = x.view_as(x) if y is None else total_NW.view(x.shape)
        ctx.save_for_backward(total, weight_W)
        ctx.eps, ctx.has_sum = eps, y is not None
        ctx.set_materialize_grads(False)
        return total, normed_NW.view(x.shape)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("add_rms_norm")
    def backward(
        ctx: Any, along: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        from megatron.optimus.ops.triton import norm

        total, weight_W = ctx.saved_tensors
        if grad is None:
            return along, along if ctx.has_sum else None, None, None
        along_NW = None if along is None else _rows(along, weight_W)
        dx, dweight = norm.rms_norm_backward(_rows(total, weight_W), weight_W, _rows(grad, weight_W), along_NW, ctx.eps)
        dx = dx.view(total.shape)
        return dx, dx if ctx.has_sum else None, dweight, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHd: Tensor, weight_W: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        from megatron.optimus.ops.triton import norm

        batch_stride, row_stride, *inner_strides = x_BSHd.stride()
        _, length, _, width = x_BSHd.shape
        # Gaps between rows may be: float8 projections leave queries, keys and values side by side.
        if inner_strides != [width, 1] or batch_stride != length * row_stride:
            x_BSHd = x_BSHd.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x_BSHd, weight_W, cos, sin)
        ctx.eps = eps
        return norm.norm_rotate(x_BSHd, weight_W, eps, cos, sin).transpose(1, 2)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("norm_rotate")
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        from megatron.optimus.ops.triton import norm

        x_BSHd, weight_W, cos, sin = ctx.saved_tensors
        grad_BHSd = grad_BHSd if grad_BHSd.stride(-1) == 1 else grad_BHSd.contiguous()
        dx, dweight = norm.norm_rotate_backward(x_BSHd, weight_W, grad_BHSd, ctx.eps, cos, sin)
        return dx, dweight, None, None, None
