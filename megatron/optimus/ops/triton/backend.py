"""Backend ``triton``: the functions that ops calls, and the expert layer composed of the kernels beside this file.

For GPUs of NVIDIA, AMD and Intel, in 16 bits. The layer saves for its backward x [T, D], hidden [N, 2F] of the N = TK
slots in expert order, and that order: 2TD + 4TKF bytes in 16 bits and 8 bytes of indices per slot. The backward
recomputes SwiGLU, no product. It uses dweight = <dy @ down, activation>, so neither the experts' outputs nor their
gradients are kept (arXiv 2512.14080).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.fused_moe import register_moe_mlp
from megatron.optimus.ops.main_grads import kernel_output, store_gradient
from megatron.optimus.ops.triton.grouped_gemm import rows_times_weight, up_swiglu, weight_gradient
from megatron.optimus.ops.triton.permute import (
    copy_rows,
    spread_rows,
    spread_rows_and_weights,
    sum_copies,
    sum_rows,
    swiglu_backward_,
)
from megatron.optimus.ops.triton.router import MAX_EXPERTS, router_topk, router_topk_backward
from megatron.optimus.ops.triton.row_order import PaddedRowOrder, order_rows, row_order_sizes

__all__ = [  # what ops calls: see ops/backend.py
    "MAX_EXPERTS",  # of router_topk
    "copy_rows",
    "expert_counts",
    "moe_mlp_backward_inputs",
    "moe_mlp_backward_up_weights",
    "moe_mlp_forward",
    "router_topk",
    "router_topk_backward",
    "sum_copies",
]

_ALIGN = 8  # the tensor memory engine wants rows of a multiple of 16 bytes


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """See ``reference.expert_counts``."""
    if indices_TK.numel() == 0:
        return indices_TK.new_zeros(num_experts, dtype=torch.int64)
    return order_rows(indices_TK, num_experts).count_E.long()


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``. Widths that are no multiple of 8 are padded in a copy."""
    x, gate_up, down = aligned(x_TD, gate_up_E2FD, down_EDF)
    y_TD, hidden, order = _moe_mlp(x, gate_up, down, weights_TK, indices_TK)
    return y_TD if x is x_TD else y_TD[:, : x_TD.shape[1]], [hidden, *order]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """The first half of the backward, see ``fused_moe.MoeKernels``."""
    width, inner = arguments[2].shape[1:]
    x, gate_up, down = aligned(*arguments[:3])
    is_padded = x is not arguments[0]
    if is_padded:
        dy_TD = pad(dy_TD, (0, x.shape[1] - width))
    output, adds = kernel_output(down_buffer, accumulate, down.shape, is_padded=is_padded)
    dx, ddown, dweights, *pending = _input_gradients(
        dy_TD, x, gate_up, down, arguments[3], saved[0], saved[1:], output, adds
    )
    if is_padded:
        dx, ddown = dx[:, :width], ddown[:, :width, :inner]
    return dx, store_gradient(ddown, output, down_buffer, accumulate), dweights, pending


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: list[Tensor],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """The second half of the backward, see ``fused_moe.MoeKernels``."""
    width, inner = arguments[2].shape[1:]
    dhidden, x_rows = pending
    is_padded = (x_rows.shape[1], dhidden.shape[1]) != (width, 2 * inner)
    shape = (arguments[1].shape[0], dhidden.shape[1], x_rows.shape[1])
    output, adds = kernel_output(gate_up_buffer, accumulate, shape, is_padded=is_padded)
    dgate_up = weight_gradient(dhidden, x_rows, PaddedRowOrder(*saved[1:]), out=output, accumulate=adds)
    if is_padded:
        dgate_up = dgate_up.unflatten(1, (2, -1))[:, :, :inner, :width].flatten(1, 2)
    return store_gradient(dgate_up, output, gate_up_buffer, accumulate)


def aligned(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads both widths with zeros to a multiple of _ALIGN; returns the very arguments where none are needed."""
    width, inner = down.shape[1:]
    more_d, more_f = -width % _ALIGN, -inner % _ALIGN
    if not (more_d or more_f):
        return x, gate_up, down
    gate_up = pad(gate_up.unflatten(1, (2, inner)), (0, more_d, 0, more_f)).flatten(1, 2)
    return pad(x, (0, more_d)), gate_up, pad(down, (0, more_f, 0, more_d))


@torch.library.custom_op("optimus_triton::moe_mlp", mutates_args=())
def _moe_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    x, gate_up, down, weights = (t.contiguous() for t in (x, gate_up, down, weights))
    topk = indices.shape[1]
    order = order_rows(indices, down.shape[0])
    hidden, activation = up_swiglu(spread_rows(x, order, topk), gate_up, order, without_padding=True)
    y_rows = rows_times_weight(activation, down, order, transposed=True)
    return sum_rows(y_rows, order, weights, topk, out=torch.empty_like(x)), hidden, list(order)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _on_second_stream(device: torch.device) -> Iterator[None]:
    """Launches inside run on a second stream, after all work so far; ``_join`` makes later work wait for them.

    For kernels bound by memory beside products bound by the tensor cores. Their outputs are allocated outside, so that
    all memory belongs to the first stream, and freed after the join. Intel GPUs use one stream: whether a second one
    gains there is not measured.
    """
    if device.type != "cuda":
        yield
        return
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))


@torch.library.custom_op("optimus_triton::moe_mlp_backward", mutates_args=())
def _moe_mlp_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, order_tensors: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, ddown, dweights, dhidden, x_rows = _input_gradients(
        dy, x, gate_up, down, weights, hidden, order_tensors, None, False
    )
    return dx, weight_gradient(dhidden, x_rows, PaddedRowOrder(*order_tensors)), ddown, dweights


def _input_gradients(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor,
    order_tensors: list[Tensor], down_buffer: Tensor | None, accumulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dx, ddown (in ``down_buffer`` if there is one), dweights, and dhidden and x in expert order, whose
    product is dgate_up."""
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    topk = weights.shape[1]
    order = PaddedRowOrder(*order_tensors)
    dy_rows, row_weight = spread_rows_and_weights(dy, order, weights)
    x_rows, dx = torch.empty_like(dy_rows), torch.empty_like(x)
    with _on_second_stream(x.device):
        spread_rows(x, order, topk, out=x_rows)
    activation = rows_times_weight(dy_rows, down, order, transposed=False)  # its gradient, until the next line
    dhidden, dweights = swiglu_backward_(activation, hidden, row_weight, order, topk)
    dx_rows = rows_times_weight(dhidden, gate_up, order, transposed=False)
    _join(x.device)
    with _on_second_stream(x.device):
        sum_rows(dx_rows, order, None, topk, out=dx)
    ddown = weight_gradient(dy_rows, activation, order, out=down_buffer, accumulate=accumulate)
    _join(x.device)
    return dx, ddown, dweights, dhidden, x_rows


def _empty_order(indices: Tensor, num_experts: int) -> list[Tensor]:
    return [indices.new_empty(n, dtype=torch.int32) for n in row_order_sizes(indices.numel(), num_experts)]


register_moe_mlp(
    "optimus_triton::moe_mlp",
    lambda dy, x, gate_up, down, weights, hidden, *order: _moe_mlp_backward(
        dy, x, gate_up, down, weights, hidden, list(order)
    ),
    _empty_order,
)
