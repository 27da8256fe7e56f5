"""Autograd and shape inference of the C++ operations (csrc/cpu); import after the compiled library is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OP = "optimus::moe_mlp"


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in C++. Saves its arguments and the hidden rows [T*K, 2F] before SwiGLU."""
    return torch.ops.optimus.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)[0]


@torch.library.register_fake(_OP)
def _fake(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(indices.numel(), gate_up.shape[1])


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
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd fills a gradient of hidden with zeros


def _backward(ctx: Any, dy: Tensor | None, _dhidden: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, gate_up, down, weights, indices, hidden = ctx.saved_tensors
    grads = torch.ops.optimus.moe_mlp_backward(dy, x, gate_up, down, weights, indices, hidden)
    return (*grads, None)


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
