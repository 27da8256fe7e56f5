"""What lies between the products of a dense layer: plain PyTorch (``reference``), or one Triton kernel each on NVIDIA
GPUs (on Intel's where the router is Triton's, too), where passes over memory are what these operations cost. In a
compiled graph the compiler fuses the former.

Shapes: B sequences, H heads, S positions, d head width, C tokens of a chunk, V rows of the vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.backend import Backend, resolve_routing
from megatron.optimus.ops.forward_mode import refuse_tangents, reverse_mode_only
from megatron.optimus.ops.second_derivatives import first_derivative_only
from megatron.optimus.ops.shapes_only import lacks_values

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + d/2) of every head by its position's angle, in fp32; see ``reference.rotate``.

    ``cos``, ``sin``: fp32 [S, d] or [B, 1, S, d], both halves alike, without gradients. Raises ValueError for an odd d,
    or a table that does not fit or is on another device.
    """
    tables = (tuple(x_BHSd.shape[-2:]), (*x_BHSd.shape[:1], 1, *x_BHSd.shape[-2:]))
    if x_BHSd.dim() != 4 or x_BHSd.shape[-1] % 2 or cos.shape != sin.shape or tuple(cos.shape) not in tables:
        raise ValueError(
            f"rotate: x {tuple(x_BHSd.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected "
            "[B, H, S, d] with even d and [S, d] or [B, 1, S, d]"
        )
    _check_place("rotate", x_BHSd, cos, sin)
    if _kernels_for(x_BHSd) is None:
        return reference.rotate(x_BHSd, cos, sin)
    refuse_tangents("rotate", x_BHSd, cos, sin)
    return _Rotate.apply(x_BHSd, cos, sin)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, two floating tensors of one shape, dtype and device. Raises ValueError if they are not."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"silu_mul: gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} differ")
    _check_place("silu_mul", gate, up)
    if _kernels_for(gate) is None:
        return reference.silu_mul(gate, up)
    refuse_tangents("silu_mul", gate, up)
    return _SiluMul.apply(gate, up)


def log_sum_exp(logits_CV: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row, fp32 [C]; no gradient. Raises ValueError for what is not floating [C, V]."""
    _check_logits("log_sum_exp", logits_CV)
    kernels = _kernels_for(logits_CV)
    if kernels is None:
        return reference.log_sum_exp(logits_CV)
    refuse_tangents("log_sum_exp", logits_CV)
    return kernels.log_sum_exp(logits_CV.contiguous())


def keeps_16_bits(x: Tensor) -> bool:
    """Whether ``log_sum_exp`` and ``cross_entropy_gradient_`` of logits of this dtype and device make no fp32 copy of
    them."""
    return x.element_size() == 2 and _kernels_for(x) is not None


def cross_entropy_gradient_(
    logits_CV: Tensor, lse_C: Tensor, columns_C: Tensor, here_C: Tensor, valid_C: Tensor, z_loss_coeff: float
) -> Tensor:
    """The gradient of the summed cross-entropy with respect to the logits, which may be overwritten; see
    ``reference.cross_entropy_gradient_``. ``columns_C`` int64 in [0, V), which is not looked at; ``here_C`` and
    ``valid_C`` bool. Raises ValueError for logits that are not floating [C, V], or rows' values that are not [C] of
    those dtypes on their device."""
    _check_logits("cross_entropy_gradient_", logits_CV, lse_C, columns_C, here_C, valid_C)
    kernels = _kernels_for(logits_CV)
    arguments = (lse_C, columns_C, here_C, valid_C, z_loss_coeff)
    if kernels is None:
        return reference.cross_entropy_gradient_(logits_CV, *arguments)
    refuse_tangents("cross_entropy_gradient_", logits_CV, lse_C)
    return kernels.cross_entropy_gradient_(logits_CV.contiguous(), *arguments)


def _check_place(name: str, x: Tensor, *others: Tensor) -> None:
    """A kernel that is handed the address of other memory reads it without a word."""
    if not x.is_floating_point():
        raise ValueError(f"{name}: {x.dtype}; expected a floating dtype")
    for other in others:
        if other.device != x.device:
            raise ValueError(f"{name}: the first argument is on {x.device} but another is on {other.device}")


def _check_logits(name: str, logits: Tensor, *of_rows: Tensor) -> None:
    """``of_rows``: log-sum-exps, columns, and two of bool."""
    _check_place(name, logits, *of_rows)
    wanted = zip(of_rows, (torch.float32, torch.int64, torch.bool, torch.bool), strict=False)  # none of them, or all
    if logits.dim() != 2 or any(t.dtype != dtype or t.shape != logits.shape[:1] for t, dtype in wanted):
        given = [f"{t.dtype} {tuple(t.shape)}" for t in of_rows]
        raise ValueError(
            f"{name}: logits {tuple(logits.shape)} with {given}; expected [C, V]"
            + (" with [C] of float32, int64, bool and bool" if given else "")
        )


def _kernels_for(x: Tensor) -> ModuleType | None:
    if x.dtype not in _DTYPES or x.numel() == 0 or torch.compiler.is_compiling():
        return None
    if resolve_routing(x.device) != Backend.TRITON or lacks_values(x):
        return None
    from megatron.optimus.ops.triton import elementwise

    return elementwise


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BHSd, cos, sin, inverse=False)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("rotate")
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grad_BHSd, *ctx.saved_tensors, inverse=True), None, None


def _turned(x_BHSd: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
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
