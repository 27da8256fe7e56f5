"""``reference.moe_mlp`` on NVIDIA GPUs: forward and backward composed of the kernels beside this file.

Saved for the backward: x [T, D], hidden [P, 2F] and the row order: 2TD + 4TKF bytes in 16 bits, plus the padding of at
most ROW_TILE rows per expert and 8 bytes of indices per slot. The backward recomputes SwiGLU, no product. It uses
dweight = <dy @ down, activation>, so neither the experts' outputs nor their gradients are kept (arXiv 2512.14080).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.triton import gemm, index, rows

_ALIGN = 8  # the tensor memory engine wants rows of a multiple of 16 bytes


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """``reference.moe_mlp`` in bf16 or fp16; widths that are no multiple of 8 are padded by a copy of the weights."""
    width, inner = x_TD.shape[1], down_EDF.shape[2]
    more_d, more_f = -width % _ALIGN, -inner % _ALIGN
    if more_d or more_f:
        x_TD = pad(x_TD, (0, more_d))
        gate_up_E2FD = pad(gate_up_E2FD.unflatten(1, (2, inner)), (0, more_d, 0, more_f)).flatten(1, 2)
        down_EDF = pad(down_EDF, (0, more_f, 0, more_d))
    y_TD = _moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)[0]
    return y_TD[:, :width] if more_d else y_TD


@torch.library.custom_op("optimus_triton::moe_mlp", mutates_args=())
def _moe_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    x, gate_up, down, weights = (t.contiguous() for t in (x, gate_up, down, weights))
    topk = indices.shape[1]
    order = index.order_rows(indices, down.shape[0])
    hidden, activation = gemm.up_swiglu(rows.spread_rows(x, order, topk), gate_up, order)
    y_rows = gemm.rows_times_weight(activation, down, order, transposed=True)
    return rows.sum_rows(y_rows, order, weights, topk, out=torch.empty_like(x)), hidden, list(order)


@_moe_mlp.register_fake
def _(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    sizes = index.row_order_sizes(indices.numel(), down.shape[0])
    order = [x.new_empty(size, dtype=torch.int32) for size in sizes]
    return torch.empty_like(x), x.new_empty(sizes[0], gate_up.shape[1]), order


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Launches inside run on a second stream, after all work so far; ``_join`` makes later work wait for them.

    For kernels bound by memory beside products bound by the tensor cores. Their outputs are allocated outside, so that
    all memory belongs to the first stream, and freed after the join.
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
    ddown = gemm.weight_gradient(dy_rows, activation, order)
    dgate_up = gemm.weight_gradient(dhidden, x_rows, order)
    _join(x.device)
    return dx, dgate_up, ddown, dweights


@_moe_mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: Tensor, row_order: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate_up), torch.empty_like(down), torch.empty_like(weights)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    x, gate_up, down, weights, _ = inputs
    _, hidden, row_order = output
    ctx.save_for_backward(x, gate_up, down, weights, hidden, *row_order)
    ctx.mark_non_differentiable(hidden, *row_order)
    ctx.set_materialize_grads(False)  # else autograd fills a gradient of hidden with zeros


def _backward(ctx: Any, dy: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, gate_up, down, weights, hidden, *row_order = ctx.saved_tensors
    return (*_moe_mlp_backward(dy, x, gate_up, down, weights, hidden, row_order), None)


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
