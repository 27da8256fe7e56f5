"""Products of one input with several weights, whose backward sums the gradients of the input in the products.

Autograd would write one gradient of the input for each weight and then read them all. On GPUs every product after the
first adds to the sum of those before. Elsewhere these are plain products.

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


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns x @ weight.T [..., N] for each weight.

    Args:
        x: floating [..., D].
        weights: [N, D] each, of x's dtype.
    """
    # Under autocast a product chooses its dtype itself.
    if len(weights) == 1 or not runs_triton(x) or torch.is_autocast_enabled(x.device.type):
        return tuple(F.linear(x, weight) for weight in weights)
    refuse_tangents("linears", x, *weights)
    return _Linears.apply(x, *weights)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_ND: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights_ND)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight_ND) for weight_ND in weights_ND)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("linears")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights_ND = ctx.saved_tensors
        x_TD = x.reshape(-1, x.shape[-1])
        needs_x, *needs_weights = ctx.needs_input_grad
        dx_TD: Tensor | None = None
        dweights: list[Tensor | None] = []
        for grad, weight_ND, needs_weight in zip(grads, weights_ND, needs_weights, strict=True):
            grad_TN = None if grad is None else grad.reshape(-1, grad.shape[-1])
            if grad_TN is not None and needs_x:
                dx_TD = grad_TN @ weight_ND if dx_TD is None else dx_TD.addmm_(grad_TN, weight_ND)
            dweights.append(grad_TN.T @ x_TD if grad_TN is not None and needs_weight else None)
        return None if dx_TD is None else dx_TD.view(x.shape), *dweights
