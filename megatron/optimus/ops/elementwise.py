"""Element-wise operations of dense layers: rotary embedding, SwiGLU, and the two passes of cross-entropy over logits.

Their cost is passes over memory. On NVIDIA GPUs (and on Intel's where the router is Triton's) each is one Triton
kernel, elsewhere plain PyTorch (``reference``), which the compiler fuses in a compiled graph.

Shapes: B sequences, H heads, S positions, d head width, C tokens of a chunk, V rows of the vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import (
    first_derivative_only,
    is_shape_only,
    refuse_tangents,
    reverse_mode_only,
)
from megatron.optimus.ops.backend import Backend, resolve_routing

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair (i, i + d/2) of every head by its position's angle, in fp32.

    Args:
        x_BHSd: queries or keys [B, H, S, d], floating.
        cos: fp32 [S, d] or [B, 1, S, d], both halves of d alike, without gradient.
        sin: likewise.

    Returns:
        [B, H, S, d] in x's dtype.

    Raises:
        ValueError: d is odd, or a table does not fit or is on another device.
    """
    check_tables("rotate", tuple(x_BHSd.shape), cos, sin)
    check_device("rotate", x_BHSd, cos, sin)
    if _kernels_for(x_BHSd) is None:
        return reference.rotate(x_BHSd, cos, sin)
    refuse_tangents("rotate", x_BHSd, cos, sin)
    return _Rotate.apply(x_BHSd, cos, sin)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up.

    Args:
        gate: floating, any shape.
        up: of gate's shape, dtype and device.

    Raises:
        ValueError: the two differ in shape, dtype or device.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"silu_mul: gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} differ")
    check_device("silu_mul", gate, up)
    if _kernels_for(gate) is None:
        return reference.silu_mul(gate, up)
    refuse_tangents("silu_mul", gate, up)
    return _SiluMul.apply(gate, up)


def log_sum_exp(logits_CV: Tensor) -> Tensor:
    """Returns log(sum(exp(logits))) of each row in fp32 [C], without gradient.

    Args:
        logits_CV: floating [C, V].

    Raises:
        ValueError: logits are not floating [C, V].
    """
    _check_logits("log_sum_exp", logits_CV)
    kernels = _kernels_for(logits_CV)
    if kernels is None:
        return reference.log_sum_exp(logits_CV)
    refuse_tangents("log_sum_exp", logits_CV)
    return kernels.log_sum_exp(logits_CV.contiguous())


def keeps_16_bits(x: Tensor) -> bool:
    """Whether ``log_sum_exp`` and ``cross_entropy_gradient_`` need no fp32 copy of logits of this dtype and device."""
    return x.element_size() == 2 and _kernels_for(x) is not None


def cross_entropy_gradient_(
    logits_CV: Tensor, lse_C: Tensor, columns_C: Tensor, here_C: Tensor, valid_C: Tensor, z_loss_coeff: float
) -> Tensor:
    """Returns the gradient of the summed cross-entropy and z-loss with respect to the logits.

    Args:
        logits_CV: floating [C, V]; may be overwritten with the result.
        lse_C: fp32 [C], ``log_sum_exp`` of the logits (over all tensor-parallel ranks).
        columns_C: int64 [C] in [0, V), not checked: the label's column.
        here_C: bool [C], whether the label's column is on this rank.
        valid_C: bool [C], whether the row counts; others get zero.
        z_loss_coeff: factor of lse**2 in the loss.

    Returns:
        [C, V] in the logits' dtype, rounded once from fp32.

    Raises:
        ValueError: logits are not floating [C, V], or the others are not [C] of these dtypes on their device.
    """
    _check_logits("cross_entropy_gradient_", logits_CV, lse_C, columns_C, here_C, valid_C)
    kernels = _kernels_for(logits_CV)
    arguments = (lse_C, columns_C, here_C, valid_C, z_loss_coeff)
    if kernels is None:
        return reference.cross_entropy_gradient_(logits_CV, *arguments)
    refuse_tangents("cross_entropy_gradient_", logits_CV, lse_C)
    return kernels.cross_entropy_gradient_(logits_CV.contiguous(), *arguments)


def check_tables(name: str, shape_BHSd: tuple[int, ...], cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError where tables of the rotary embedding do not fit queries or keys of this shape."""
    tables = (shape_BHSd[-2:], (*shape_BHSd[:1], 1, *shape_BHSd[-2:]))
    if len(shape_BHSd) != 4 or shape_BHSd[-1] % 2 or cos.shape != sin.shape or tuple(cos.shape) not in tables:
        raise ValueError(
            f"{name}: x {shape_BHSd}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected "
            "[B, H, S, d] with even d and [S, d] or [B, 1, S, d]"
        )


def check_device(name: str, x: Tensor, *others: Tensor) -> None:
    """Raises ValueError for another device: a kernel given an address of other memory would read it silently."""
    if not x.is_floating_point():
        raise ValueError(f"{name}: {x.dtype}; expected a floating dtype")
    for other in others:
        if other.device != x.device:
            raise ValueError(f"{name}: the first argument is on {x.device} but another is on {other.device}")


def _check_logits(name: str, logits: Tensor, *of_rows: Tensor) -> None:
    """``of_rows``: log-sum-exps, columns, and two of bool."""
    check_device(name, logits, *of_rows)
    wanted = zip(of_rows, (torch.float32, torch.int64, torch.bool, torch.bool), strict=False)  # none of them, or all
    if logits.dim() != 2 or any(t.dtype != dtype or t.shape != logits.shape[:1] for t, dtype in wanted):
        given = [f"{t.dtype} {tuple(t.shape)}" for t in of_rows]
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} with {given}; expected [C, V]"
            + (" with [C] of float32, int64, bool and bool" if given else "")
        )


def runs_triton(x: Tensor) -> bool:
    """Whether Triton's kernels compute with this tensor."""
    if x.dtype not in _DTYPES or x.numel() == 0 or torch.compiler.is_compiling():
        return False
    return resolve_routing(x.device) == Backend.TRITON and not is_shape_only(x)


def _kernels_for(x: Tensor) -> ModuleType | None:
    if not runs_triton(x):
        return None
    from megatron.optimus.ops.triton import elementwise

    return elementwise


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_BHSd, cos, sin, inverse=False)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("rotate")
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grad_BHSd, *ctx.saved_tensors, inverse=True), None, None


def _rotated(x_BHSd: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    kernels = _kernels_for(x_BHSd)
    assert kernels is not None, "chosen before"
    x_BHSd = x_BHSd if x_BHSd.stride(-1) == 1 else x_BHSd.contiguous()
    return kernels.rotate(x_BHSd, cos.contiguous(), sin.contiguous(), inverse)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        kernels = _kernels_for(gate)
        assert kernels is not None, "chosen before"
        return kernels.silu_mul(gate.contiguous(), up.contiguous())

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("silu_mul")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        kernels = _kernels_for(grad)
        assert kernels is not None, "chosen before"
        gate, up = ctx.saved_tensors
        return kernels.silu_mul_backward(gate.contiguous(), up.contiguous(), grad.contiguous())
