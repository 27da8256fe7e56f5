"""Backend ``cuda``: the expert layer on Hopper GPUs in CUDA C++ (csrc/cuda). All other operations are Triton's.

One operation forward and one backward launch all kernels. Saved are hidden [T*K, 2F], in the row order of
triton/row_order.py without its padding, and the order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.fused_moe import register_backward_into, register_moe_mlp
from megatron.optimus.ops.main_grads import kernel_output, store_gradient
from megatron.optimus.ops.triton.backend import aligned
from megatron.optimus.ops.triton.row_order import row_order_sizes

_C = torch.ops.optimus


def is_built() -> bool:
    """Whether the compiled operations, which must be loaded, include those of csrc/cuda."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("optimus::cuda_moe_mlp", "CUDA")


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``. In bf16 or fp16; widths that are no multiple of 8 are padded in a copy."""
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
    """See ``fused_moe.MoeKernels``. A buffer in 16 bits is added to, and the buffer of a padded weight added to or
    overwritten, from an fp32 gradient."""
    x, gate_up, down = aligned(*arguments[:3])
    is_padded = x is not arguments[0]
    pairs = zip((gate_up, down), buffers, accumulate, strict=True)
    outputs, adds = zip(*(_output(w, b, is_padded, a) for w, b, a in pairs), strict=True)
    if is_padded:
        dy_TD = pad(dy_TD, (0, x.shape[1] - dy_TD.shape[1]))
    dx, dweights = _C.cuda_moe_mlp_backward_into(dy_TD, x, gate_up, down, arguments[3], *saved, *outputs, *adds)
    width, inner = arguments[2].shape[1:]
    dgate_up = store_gradient(_without_padding(outputs[0], arguments[2]), outputs[0], buffers[0], accumulate[0])
    ddown = store_gradient(outputs[1][:, :width, :inner], outputs[1], buffers[1], accumulate[1])
    return dx[:, :width], dgate_up, ddown, dweights


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """The first half of the backward, which completes dx: see ``fused_moe.MoeKernels``.

    The halves give the bits of the whole and take 1% longer, as the sum of dx is cheapest beside the last product.
    """
    x, gate_up, down = aligned(*arguments[:3])
    is_padded = x is not arguments[0]
    if is_padded:
        dy_TD = pad(dy_TD, (0, x.shape[1] - dy_TD.shape[1]))
    output, adds = _output(down, down_buffer, is_padded, accumulate)
    dx, dweights, *pending = _C.cuda_moe_mlp_backward_inputs(
        dy_TD, x, gate_up, down, arguments[3], *saved, output, adds
    )
    width, inner = arguments[2].shape[1:]
    ddown = store_gradient(output[:, :width, :inner], output, down_buffer, accumulate)
    return dx[:, :width], ddown, dweights, pending


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: list[Tensor],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """The second half of the backward, to be run once, on the stream of the first half or one that waited for it."""
    gate_up = aligned(*arguments[:3])[1]
    output, adds = _output(gate_up, gate_up_buffer, gate_up is not arguments[1], accumulate)
    tokens, topk = arguments[3].shape
    _C.cuda_moe_mlp_backward_up_weights(*pending, saved[1], tokens, topk, output, adds)
    return store_gradient(_without_padding(output, arguments[2]), output, gate_up_buffer, accumulate)


def _without_padding(dgate_up: Tensor, down_EDF: Tensor) -> Tensor:
    """The gradient of gate_up without the padding of its widths."""
    width, inner = down_EDF.shape[1:]
    if dgate_up.shape[1:] == (2 * inner, width):
        return dgate_up
    return dgate_up.unflatten(1, (2, -1))[:, :, :inner, :width].flatten(1, 2)


def _output(weight: Tensor, buffer: Tensor | None, is_padded: bool, accumulate: bool) -> tuple[Tensor, bool]:
    """Where the kernels write a weight's gradient, and whether they add to it, which they do in fp32 only."""
    output, adds = kernel_output(buffer, accumulate, weight.shape, is_padded=is_padded, adds_in_16_bits=False)
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if output is None else output, adds


def _empty_order(indices: Tensor, num_experts: int) -> Tensor:
    return indices.new_empty(sum(row_order_sizes(indices.numel(), num_experts)), dtype=torch.int32)


register_moe_mlp("optimus::cuda_moe_mlp", _C.cuda_moe_mlp_backward, _empty_order)
register_backward_into("optimus::cuda_moe_mlp_backward_into")


@torch.library.register_fake("optimus::cuda_moe_mlp_backward_inputs")
def _backward_inputs_shapes(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, order: Tensor,
    ddown: Tensor, add_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = row_order_sizes(weights.numel(), down.shape[0])[0] if weights.numel() else 0
    pending = x.new_empty(rows, gate_up.shape[1]), x.new_empty(rows, x.shape[1])
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *pending


@torch.library.register_fake("optimus::cuda_moe_mlp_backward_up_weights")
def _backward_up_weights_shapes(
    dhidden: Tensor, x_rows: Tensor, order: Tensor, tokens: int, topk: int, dgate_up: Tensor, add: bool
) -> None:  # fmt: skip
    return None
