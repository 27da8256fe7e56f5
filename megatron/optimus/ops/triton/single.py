# mypy: disable-error-code=no-untyped-def
"""The kernels of this package as single operations: the set of functions that grouped.py and routing.py call.

Rows are laid out as index.py says: P rows, those of an expert from a multiple of ROW_TILE on. A row of no slot inside a
used tile is read by the products, so it must be finite, and zero in one of the two operands of a weight gradient;
``gather_rows`` and ``combine_backward`` write zeros there, and what is computed from zeros row by row stays finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from megatron.optimus.ops.reference import RowOrder
from megatron.optimus.ops.triton import gemm, index, rows
from megatron.optimus.ops.triton.moe_mlp import (
    moe_mlp,
    moe_mlp_backward_inputs,
    moe_mlp_backward_up_weights,
    moe_mlp_forward,
)
from megatron.optimus.ops.triton.router import MAX_EXPERTS, router_topk, router_topk_backward
from megatron.optimus.ops.triton.rows import copy_rows, sum_copies

__all__ = [  # and the functions below
    "MAX_EXPERTS",  # of router_topk
    "copy_rows",
    "moe_mlp",
    "moe_mlp_backward_inputs",
    "moe_mlp_backward_up_weights",
    "moe_mlp_forward",
    "router_topk",
    "router_topk_backward",
    "sum_copies",
]

_ALIGN = 8  # the tensor memory engine wants rows of a multiple of 16 bytes


def order_sizes(num_slots: int, num_experts: int) -> list[int]:
    """Elements of an order's tensors: slots, rows, counts, then the plan: first rows and the rest."""
    num_rows, num_slots, first_rows, counts, *rest = index.row_order_sizes(num_slots, num_experts)
    return [num_rows, num_slots, counts, first_rows, *rest]


def sort_slots(indices_TK: Tensor, num_experts: int) -> RowOrder:
    if indices_TK.numel() == 0:
        return _order_of_nothing(indices_TK, num_experts)
    order = index.order_rows(indices_TK, num_experts)
    rows_TK = order.row_N.view(indices_TK.shape)
    return RowOrder(order.slot_P, rows_TK, order.count_E, [order.first_row_E, *order[4:]])


def _order(order: RowOrder) -> index.RowOrder:
    return index.RowOrder(order.slots_P, order.rows_N, order.plan[0], order.counts_E, *order.plan[1:])


def _order_of_nothing(indices_TK: Tensor, num_experts: int) -> RowOrder:
    device = indices_TK.device
    tensors = [torch.zeros(size, dtype=torch.int32, device=device) for size in order_sizes(0, num_experts)]
    order = RowOrder(tensors[0].fill_(-1), tensors[1].view(indices_TK.shape), tensors[2], tensors[3:])
    _order(order).tile_expert.fill_(-1)
    torch.arange(num_experts, dtype=torch.int32, device=device, out=_order(order).by_size_E)
    return order


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    return sort_slots(indices_TK, num_experts).counts_E.long()


def _block_shape(width: int) -> tuple[int, int]:
    """Rows and columns of a program of the kernels here: about 4096 elements, rows dividing ROW_TILE."""
    columns = min(triton.next_power_of_2(width), 1024)
    return min(4096 // columns, index.ROW_TILE), columns


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    num_slots = order.rows_N.numel()
    if num_slots == 0:
        return x_TD.new_zeros(order.slots_P.numel(), x_TD.shape[1])
    return rows.spread_rows(x_TD, _order(order), num_slots // x_TD.shape[0])


def combine(rows_PD: Tensor, order: RowOrder, weights_TK: Tensor | None, num_tokens: int) -> Tensor:
    out = rows_PD.new_empty(num_tokens, rows_PD.shape[1])
    if num_tokens == 0:
        return out
    return rows.sum_rows(rows_PD, _order(order), weights_TK, order.rows_N.numel() // num_tokens, out=out)


@triton.jit
def _combine_backward(
    dy_ptr, rows_ptr, slot_ptr, weights_ptr, num_tiles_ptr, drows_ptr, dweights_ptr, width,
    TOPK: tl.constexpr, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    if first < tl.load(num_tiles_ptr) * ROW_TILE:
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slot_ptr + row)
        used = (slot >= 0)[:, None]
        weight = tl.load(weights_ptr + slot, mask=slot >= 0, other=0.0)[:, None]
        start = row.to(tl.int64)[:, None] * width
        token = (slot // TOPK).to(tl.int64)[:, None] * width
        dweight = tl.zeros([ROWS], dtype=tl.float32)
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            inside = col < width
            dy = tl.load(dy_ptr + token + col, mask=inside & used, other=0.0).to(tl.float32)
            value = tl.load(rows_ptr + start + col, mask=inside & used, other=0.0).to(tl.float32)
            dweight += tl.sum(dy * value, 1)
            tl.store(drows_ptr + start + col, (weight * dy).to(drows_ptr.dtype.element_ty), mask=inside)
        tl.store(dweights_ptr + slot, dweight, mask=slot >= 0)


def combine_backward(dy_TD: Tensor, rows_PD: Tensor, order: RowOrder, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    drows, dweights = torch.empty_like(rows_PD), torch.zeros_like(weights_TK)
    width = rows_PD.shape[1]
    num_rows, columns = _block_shape(width)
    _combine_backward[(rows_PD.shape[0] // num_rows,)](
        dy_TD, rows_PD, order.slots_P, weights_TK, _order(order).num_tiles, drows, dweights, width,
        TOPK=weights_TK.shape[1], ROW_TILE=index.ROW_TILE, ROWS=num_rows, BLOCK=columns, num_warps=8,
    )  # fmt: skip
    return drows, dweights


@triton.jit
def _swiglu(
    hidden_ptr, grad_ptr, num_tiles_ptr, out_ptr, width,
    GRADIENT: tl.constexpr, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of used tiles, or the gradient of gate and up."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(num_tiles_ptr) * ROW_TILE:
        start = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * width
        dtype = out_ptr.dtype.element_ty
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            inside = col < width
            gate = tl.load(hidden_ptr + 2 * start + col, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(hidden_ptr + 2 * start + width + col, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            if GRADIENT:
                grad = tl.load(grad_ptr + start + col, mask=inside, other=0.0).to(tl.float32)
                dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
                tl.store(out_ptr + 2 * start + col, dgate.to(dtype), mask=inside)
                tl.store(out_ptr + 2 * start + width + col, (grad * silu).to(dtype), mask=inside)
            else:
                tl.store(out_ptr + start + col, (silu * up).to(dtype), mask=inside)


def _launch_swiglu(hidden: Tensor, grad: Tensor | None, order: RowOrder, out: Tensor) -> Tensor:
    width = hidden.shape[1] // 2
    num_rows, columns = _block_shape(width)
    _swiglu[(hidden.shape[0] // num_rows,)](
        hidden, grad, _order(order).num_tiles, out, width, GRADIENT=grad is not None, ROW_TILE=index.ROW_TILE,
        ROWS=num_rows, BLOCK=columns, num_warps=8,
    )  # fmt: skip
    return out


def swiglu(hidden_P2F: Tensor, order: RowOrder) -> Tensor:
    return _launch_swiglu(hidden_P2F, None, order, hidden_P2F.new_empty(hidden_P2F.shape[0], hidden_P2F.shape[1] // 2))


def swiglu_gradient(hidden_P2F: Tensor, grad_PF: Tensor, order: RowOrder) -> Tensor:
    return _launch_swiglu(hidden_P2F, grad_PF, order, torch.empty_like(hidden_P2F))


def _aligned(tensor: Tensor, *dims: int) -> Tensor:
    """A copy with zeros appended to the dimensions that are no multiple of what the hardware copies; often no copy."""
    widths = [0] * (2 * tensor.dim())
    for dim in dims:
        widths[2 * (tensor.dim() - 1 - dim % tensor.dim()) + 1] = -tensor.shape[dim] % _ALIGN
    return pad(tensor, widths) if any(widths) else tensor


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    weight = _aligned(weight_EOI, 1, 2)
    out = gemm.rows_times_weight(_aligned(x_PI, 1), weight, _order(order), transposed=True)
    return out[:, : weight_EOI.shape[1]].contiguous()


def grouped_linear_swiglu(x_PD: Tensor, gate_up_E2FD: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    inner = gate_up_E2FD.shape[1] // 2
    weight = _aligned(gate_up_E2FD.unflatten(1, (2, inner)), 2, 3).flatten(1, 2)
    hidden, activation = gemm.up_swiglu(_aligned(x_PD, 1), weight, _order(order))
    hidden = hidden.unflatten(1, (2, -1))[:, :, :inner].flatten(1)
    return activation[:, :inner].contiguous(), hidden


def grouped_input_gradient(dout_PO: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    weight = _aligned(weight_EOI, 1, 2)
    out = gemm.rows_times_weight(_aligned(dout_PO, 1), weight, _order(order), transposed=False)
    return out[:, : weight_EOI.shape[2]].contiguous()


def grouped_weight_gradient(
    dout_PO: Tensor, x_PI: Tensor, order: RowOrder, main_grad: Tensor | None, accumulate: bool
) -> Tensor:
    dout, x = _aligned(dout_PO, 1), _aligned(x_PI, 1)
    height, width = dout_PO.shape[1], x_PI.shape[1]
    if main_grad is None:
        return gemm.weight_gradient(dout, x, _order(order))[:, :height, :width].contiguous()
    out = _aligned(main_grad, 1, 2)
    gemm.weight_gradient(dout, x, _order(order), out=out, accumulate=accumulate)
    return main_grad if out is main_grad else main_grad.copy_(out[:, :height, :width])
