"""``reference.moe_mlp`` on NVIDIA and Intel GPUs: forward and backward composed of the kernels beside this file.

Saved for the backward: x [T, D], hidden [N, 2F] of the N = TK slots in expert order, and that order: 2TD + 4TKF bytes
in 16 bits and 8 bytes of indices per slot. The backward recomputes SwiGLU, no product. It uses dweight = <dy @ down,
activation>, so neither the experts' outputs nor their gradients are kept (arXiv 2512.14080).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.forward_mode import reverse_mode_only
from megatron.optimus.ops.main_grads import keep_for_backward
from megatron.optimus.ops.second_derivatives import refuse
from megatron.optimus.ops.triton import gemm, index, rows

_ALIGN = 8  # the tensor memory engine wants rows of a multiple of 16 bytes


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in bf16 or fp16; widths that are no multiple of 8 are padded by a copy of the weights."""
    x, gate_up, down = aligned(x_TD, gate_up_E2FD, down_EDF)
    y_TD = _moe_mlp(x, gate_up, down, weights_TK, indices_TK)[0]
    return y_TD if x is x_TD else y_TD[:, : x_TD.shape[1]]


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``moe_mlp`` and what its backward needs beside the arguments."""
    x, gate_up, down = aligned(x_TD, gate_up_E2FD, down_EDF)
    y_TD, hidden, row_order = _moe_mlp(x, gate_up, down, weights_TK, indices_TK)
    return y_TD[:, : x_TD.shape[1]], [hidden, *row_order]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """See ``main_grads.FusedMoE``. With padded widths the gradient is formed in fp32 beside the buffer."""
    width, inner = arguments[2].shape[1:]
    x, gate_up, down = aligned(*arguments[:3])
    is_padded = x is not arguments[0]
    if is_padded:
        dy_TD = pad(dy_TD, (0, x.shape[1] - width))
    out, adds = _place_for(down_buffer, down.shape, is_padded, accumulate)
    dx, ddown, dweights, *pending = _input_gradients(
        dy_TD, x, gate_up, down, arguments[3], saved[0], saved[1:], out, adds
    )
    if is_padded:
        dx, ddown = dx[:, :width], ddown[:, :width, :inner]
        _hand_over(ddown, down_buffer, accumulate)
    return dx, ddown if down_buffer is None else None, dweights, pending


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: list[Tensor],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``main_grads.FusedMoE``. With padded widths the gradient is formed in fp32 beside the buffer."""
    width, inner = arguments[2].shape[1:]
    dhidden, x_rows = pending
    is_padded = (x_rows.shape[1], dhidden.shape[1]) != (width, 2 * inner)
    shape = torch.Size((arguments[1].shape[0], dhidden.shape[1], x_rows.shape[1]))
    out, adds = _place_for(gate_up_buffer, shape, is_padded, accumulate)
    dgate_up = gemm.weight_gradient(dhidden, x_rows, index.RowOrder(*saved[1:]), out=out, accumulate=adds)
    if is_padded:
        dgate_up = dgate_up.unflatten(1, (2, -1))[:, :, :inner, :width].flatten(1, 2)
        _hand_over(dgate_up, gate_up_buffer, accumulate)
    return dgate_up if gate_up_buffer is None else None


def _place_for(
    buffer: Tensor | None, shape: torch.Size, is_padded: bool, accumulate: bool
) -> tuple[Tensor | None, bool]:
    """Where a product puts a weight's gradient, and whether it adds to what is there."""
    if buffer is None or not is_padded:
        return buffer, accumulate
    return torch.empty(shape, dtype=torch.float32, device=buffer.device), False


def _hand_over(gradient: Tensor, buffer: Tensor | None, accumulate: bool) -> None:
    """From a place beside the buffer."""
    if buffer is not None:
        buffer.add_(gradient) if accumulate else buffer.copy_(gradient)


def aligned(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros appended up to the next multiple of _ALIGN in both widths; the very arguments where none are needed."""
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
    order = index.order_rows(indices, down.shape[0])
    hidden, activation = gemm.up_swiglu(rows.spread_rows(x, order, topk), gate_up, order, without_padding=True)
    y_rows = gemm.rows_times_weight(activation, down, order, transposed=True)
    return rows.sum_rows(y_rows, order, weights, topk, out=torch.empty_like(x)), hidden, list(order)


@_moe_mlp.register_fake
def _(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    sizes = index.row_order_sizes(indices.numel(), down.shape[0])
    order = [x.new_empty(size, dtype=torch.int32) for size in sizes]
    return torch.empty_like(x), x.new_empty(indices.numel(), gate_up.shape[1]), order


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Launches inside run on a second stream, after all work so far; ``_join`` makes later work wait for them.

    For kernels bound by memory beside products bound by the tensor cores. Their outputs are allocated outside, so that
    all memory belongs to the first stream, and freed after the join. On Intel GPUs all runs in one stream, in order:
    whether a second one gains there is not measured.
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
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, row_order: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, ddown, dweights, dhidden, x_rows = _input_gradients(
        dy, x, gate_up, down, weights, hidden, row_order, None, False
    )
    return dx, gemm.weight_gradient(dhidden, x_rows, index.RowOrder(*row_order)), ddown, dweights


def _input_gradients(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, row_order: list[Tensor],
    down_buffer: Tensor | None, accumulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, down (in ``down_buffer`` if there is one) and weights; those of hidden, and the rows of x,
    whose product is the gradient of gate_up."""
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    topk = weights.shape[1]
    order = index.RowOrder(*row_order)
    dy_rows, row_weight = rows.spread_rows_and_weights(dy, order, weights)
    x_rows, dx = torch.empty_like(dy_rows), torch.empty_like(x)
    with _beside(x.device):
        rows.spread_rows(x, order, topk, out=x_rows)
    activation = gemm.rows_times_weight(dy_rows, down, order, transposed=False)  # its gradient, until the next line
    dhidden, dweights = rows.swiglu_backward_(activation, hidden, row_weight, order, topk)
    dx_rows = gemm.rows_times_weight(dhidden, gate_up, order, transposed=False)
    _join(x.device)
    with _beside(x.device):
        rows.sum_rows(dx_rows, order, None, topk, out=dx)
    ddown = gemm.weight_gradient(dy_rows, activation, order, out=down_buffer, accumulate=accumulate)
    _join(x.device)
    return dx, ddown, dweights, dhidden, x_rows


@_moe_mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, row_order: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate_up), torch.empty_like(down), torch.empty_like(weights)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    _, hidden, row_order = output
    keep_for_backward(ctx, inputs[:4], (hidden, *row_order))


@reverse_mode_only("moe_mlp")
def _backward(ctx: Any, dy: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, gate_up, down, weights, hidden, *row_order = ctx.saved_tensors
    return (*_moe_mlp_backward(dy, x, gate_up, down, weights, hidden, row_order), None)


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
refuse("optimus_triton::moe_mlp_backward")
