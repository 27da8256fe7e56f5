"""The expert layer on Hopper GPUs in CUDA C++ (csrc/cuda): one operation forward and one backward launch all kernels.

Saved are hidden [T K, 2F], in the row order of triton/index.py without its padding, and the order. Router and single
operations are Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.forward_mode import reverse_mode_only
from megatron.optimus.ops.main_grads import keep_for_backward
from megatron.optimus.ops.second_derivatives import refuse
from megatron.optimus.ops.triton.index import row_order_sizes
from megatron.optimus.ops.triton.moe_mlp import aligned
from megatron.optimus.ops.triton.single import (
    MAX_EXPERTS,
    combine,
    combine_backward,
    copy_rows,
    expert_counts,
    gather_rows,
    grouped_input_gradient,
    grouped_linear,
    grouped_linear_swiglu,
    grouped_weight_gradient,
    order_sizes,
    router_topk,
    router_topk_backward,
    sort_slots,
    sum_copies,
    swiglu,
    swiglu_gradient,
)

__all__ = [
    "MAX_EXPERTS",
    "combine",
    "combine_backward",
    "copy_rows",
    "expert_counts",
    "gather_rows",
    "grouped_input_gradient",
    "grouped_linear",
    "grouped_linear_swiglu",
    "grouped_weight_gradient",
    "moe_mlp",
    "moe_mlp_backward",
    "moe_mlp_backward_inputs",
    "moe_mlp_backward_up_weights",
    "moe_mlp_forward",
    "order_sizes",
    "router_topk",
    "router_topk_backward",
    "sort_slots",
    "sum_copies",
    "swiglu",
    "swiglu_gradient",
]

_C = torch.ops.optimus


def is_built() -> bool:
    """Whether the compiled operations, which must be loaded, include those of csrc/cuda."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("optimus::cuda_moe_mlp", "CUDA")


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in bf16 or fp16; widths that are no multiple of 8 are padded by a copy of the weights."""
    return moe_mlp_forward(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)[0]


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``moe_mlp`` and what its backward needs beside the arguments."""
    x, gate_up, down = aligned(x_TD, gate_up_E2FD, down_EDF)
    y_TD, hidden, order = _C.cuda_moe_mlp(x, gate_up, down, weights_TK, indices_TK)
    return y_TD if x is x_TD else y_TD[:, : x_TD.shape[1]], [hidden, order]


def moe_mlp_backward(
    dy_TD: Tensor,
    arguments: list[Tensor],
    saved: list[Tensor],
    buffers: tuple[Tensor | None, Tensor | None],
    accumulate: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """See ``main_grads.FusedMoE``. A buffer in 16 bits is added to, and one of a padded weight is added to or written,
    from an fp32 gradient."""
    x, gate_up, down = aligned(*arguments[:3])
    is_padded = x is not arguments[0]
    pairs = zip((gate_up, down), buffers, accumulate, strict=True)
    places, adds = zip(*(_place_for(w, b, is_padded, a) for w, b, a in pairs), strict=True)
    if is_padded:
        dy_TD = pad(dy_TD, (0, x.shape[1] - dy_TD.shape[1]))
    dx, dweights = _C.cuda_moe_mlp_backward_into(dy_TD, x, gate_up, down, arguments[3], *saved, *places, *adds)
    width, inner = arguments[2].shape[1:]
    dgate_up = _handed_over(_gate_up_within(places[0], arguments[2]), places[0], buffers[0], accumulate[0])
    ddown = _handed_over(places[1][:, :width, :inner], places[1], buffers[1], accumulate[1])
    return dx[:, :width], dgate_up, ddown, dweights


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """The first half of ``moe_mlp_backward``, which completes dx: so communication of it may run beside the second.

    The halves give the bits of the whole and take 1% longer, as the sum of dx is cheapest beside the last product.
    Returns dx [T, D], ddown (None where it is in ``down_buffer``), dweights, and what the second half needs.
    """
    x, gate_up, down = aligned(*arguments[:3])
    if x is not arguments[0]:
        dy_TD = pad(dy_TD, (0, x.shape[1] - dy_TD.shape[1]))
    place, adds = _place_for(down, down_buffer, x is not arguments[0], accumulate)
    dx, dweights, *pending = _C.cuda_moe_mlp_backward_inputs(dy_TD, x, gate_up, down, arguments[3], *saved, place, adds)
    width, inner = arguments[2].shape[1:]
    ddown = _handed_over(place[:, :width, :inner], place, down_buffer, accumulate)
    return dx[:, :width], ddown, dweights, pending


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: list[Tensor],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """The second half of ``moe_mlp_backward``: the gradient of gate_up, None where it is in its buffer.

    To be run once, on the stream of the first half or one that has waited for it.
    """
    gate_up = aligned(*arguments[:3])[1]
    place, adds = _place_for(gate_up, gate_up_buffer, gate_up is not arguments[1], accumulate)
    tokens, topk = arguments[3].shape
    _C.cuda_moe_mlp_backward_up_weights(*pending, saved[1], tokens, topk, place, adds)
    return _handed_over(_gate_up_within(place, arguments[2]), place, gate_up_buffer, accumulate)


def _gate_up_within(gradient: Tensor, down_EDF: Tensor) -> Tensor:
    """The gradient of gate_up without the padding of its widths."""
    width, inner = down_EDF.shape[1:]
    if gradient.shape[1:] == (2 * inner, width):
        return gradient
    return gradient.unflatten(1, (2, -1))[:, :, :inner, :width].flatten(1, 2)


def _place_for(weight: Tensor, buffer: Tensor | None, is_padded: bool, accumulate: bool) -> tuple[Tensor, bool]:
    """Where the kernels put a weight's gradient, its buffer itself or a tensor of their own, and whether they add."""
    if buffer is not None and not is_padded and (buffer.dtype == torch.float32 or not accumulate):
        return buffer, accumulate
    dtype = weight.dtype if buffer is None else torch.float32
    return torch.empty(weight.shape, dtype=dtype, device=weight.device), False


def _handed_over(gradient: Tensor, place: Tensor, buffer: Tensor | None, accumulate: bool) -> Tensor | None:
    if buffer is None:
        return gradient
    if place is not buffer:
        buffer.add_(gradient) if accumulate else buffer.copy_(gradient)
    return None


@torch.library.register_fake("optimus::cuda_moe_mlp")
def _(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = row_order_sizes(indices.numel(), down.shape[0])
    hidden = x.new_empty(indices.numel(), gate_up.shape[1])
    return x.new_empty(x.shape), hidden, x.new_empty(sum(sizes), dtype=torch.int32)


@torch.library.register_fake("optimus::cuda_moe_mlp_backward")
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, order: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gate_up, down, weights))  # type: ignore[return-value]


@torch.library.register_fake("optimus::cuda_moe_mlp_backward_into")
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, order: Tensor,
    dgate_up: Tensor, ddown: Tensor, add_gate_up: bool, add_down: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


@torch.library.register_fake("optimus::cuda_moe_mlp_backward_inputs")
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, order: Tensor,
    ddown: Tensor, add_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = row_order_sizes(weights.numel(), down.shape[0])[0] if weights.numel() else 0
    pending = x.new_empty(rows, gate_up.shape[1]), x.new_empty(rows, x.shape[1])
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *pending


@torch.library.register_fake("optimus::cuda_moe_mlp_backward_up_weights")
def _(
    dhidden: Tensor, x_rows: Tensor, order: Tensor, tokens: int, topk: int, dgate_up: Tensor, add: bool
) -> None:  # fmt: skip
    return None


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    keep_for_backward(ctx, inputs[:4], output[1:])


@reverse_mode_only("moe_mlp")
def _backward(ctx: Any, dy: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    return (*_C.cuda_moe_mlp_backward(dy, *ctx.saved_tensors), None)


torch.library.register_autograd("optimus::cuda_moe_mlp", _backward, setup_context=_setup_context)
refuse("optimus::cuda_moe_mlp_backward")
