"""Products of one input with several weights, whose backward adds up gradients in the products themselves.

Autograd would write one gradient of the input for each weight and add them up afterwards, and likewise the gradients
that a weight gets from several micro-batches. On GPUs a product after the first adds to the sum of those before, and
the gradient of a weight goes straight to the optimizer's buffer (main_grads.py). Elsewhere these are plain products.

Shapes: D input width, N output width, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.ops.autograd_guards import first_derivative_only, refuse_tangents, reverse_mode_only
from megatron.optimus.ops.elementwise import runs_triton
from megatron.optimus.ops.main_grads import MainGrad, is_used, main_grad_of
from megatron.optimus.platform.device import is_rocm


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns x @ weight.T [..., N] for each weight.

    Args:
        x: floating [..., D].
        weights: [N, D] each, of x's dtype. One with a main gradient in fp32 gets no other.
    """
    # Under autocast a product chooses its dtype itself.
    if not runs_triton(x) or torch.is_autocast_enabled(x.device.type) or not torch.is_grad_enabled():
        return tuple(F.linear(x, weight) for weight in weights)
    refuse_tangents("linears", x, *weights)
    main_grads = [main_grad_of(weight) if _adds_products(x) else None for weight in weights]
    return _Linears.apply(x, *weights, main_grads)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        *weights_ND, ctx.main_grads = inputs
        ctx.save_for_backward(x, *weights_ND)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight_ND) for weight_ND in weights_ND)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("linears")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights_ND = ctx.saved_tensors
        x_TD = x.reshape(-1, x.shape[-1])
        dx_TD: Tensor | None = None
        dweights: list[Tensor | None] = [None] * len(weights_ND)
        for index, (grad, weight_ND) in enumerate(zip(grads, weights_ND, strict=True)):
            if grad is None:
                continue
            grad_TN = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                dx_TD = grad_TN @ weight_ND if dx_TD is None else dx_TD.addmm_(grad_TN, weight_ND)
            main_grad: MainGrad | None = ctx.main_grads[index]
            if main_grad is not None and main_grad.buffer.dtype == torch.float32 and is_used(ctx, 1 + index):
                _store_product(main_grad.buffer, grad_TN.t(), x_TD, accumulate=main_grad.holds_sum())
                main_grad.ready()
            elif ctx.needs_input_grad[1 + index]:
                dweights[index] = grad_TN.t() @ x_TD
        return None if dx_TD is None else dx_TD.view(x.shape), *dweights, None


def _adds_products(x: Tensor) -> bool:
    """Whether a product of this dtype can be written, or added, to an fp32 buffer without being rounded before."""
    return x.dtype == torch.float32 or (x.is_cuda and x.element_size() == 2 and not is_rocm())


def _store_product(buffer: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """Writes a @ b to an fp32 buffer, or adds it to what is there."""
    wide: dict[str, Any] = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    if accumulate:
        torch.addmm(buffer, a, b, out=buffer, **wide)
    else:
        torch.mm(a, b, out=buffer, **wide)
