# mypy: disable-error-code=no-untyped-def
"""The expert layer with float8 products: rows in expert order (row_order.py), one scale a matrix (ops/fp8.py).

A float8 product needs both operands contiguous along the summed dimension. For weight gradients that is the rows of an
expert: their operands are written transposed, [D, P]. Router weights stay out of dy, whose rounding they would change
from row to row; they multiply the gradient of the activation and the activation itself.

Legend as in grouped_gemm.py: P rows (padded per expert), N slots, D model width, F inner width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.optimus.ops.fp8 import FORWARD, GRADIENT, kept
from megatron.optimus.ops.main_grads import kernel_output, store_gradient
from megatron.optimus.ops.triton.fp8 import inverse_scale, largest_, quantize_, store_transposed, swiglu_gradient
from megatron.optimus.ops.triton.grouped_gemm import put_part
from megatron.optimus.ops.triton.permute import spread_rows, spread_rows_and_weights, sum_rows
from megatron.optimus.ops.triton.row_order import PaddedRowOrder, order_rows
from megatron.optimus.ops.triton.tiles import ROW_TILE, hardware

# Measured on an H100, T = 16,384 of Mula-7B: 1,130 to 1,300 TFLOP/s forward and input gradients, 970 to 995 weights'.
_BM, _BN, _BK = 128, 256, 128
_ROWS, _COLUMNS = 128, 128  # of a program's tile of _spread_columns
_BACKWARD_TILE = 64  # both ways, of _swiglu_backward: 0.48 ms where 128 by 128 took 0.60 (H200, 266,368 rows of 512)


@triton.jit
def _rows_times_weight(
    a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, tile_expert_ptr, num_tiles_ptr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[p] = a[p] @ b[e].T times both scales; b is [E, N, K]."""
    num_cols: tl.constexpr = (N + BN - 1) // BN
    scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    num_tiles = tl.load(num_tiles_ptr) * num_cols
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row = tile // num_cols * BM
        col = tile % num_cols * BN
        expert = tl.load(tile_expert_ptr + tile // num_cols)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(a_desc.load([row, k]), b_desc.load([expert, col, k]).reshape(BN, BK).T, total)
        c_desc.store([row, col], (total * scale).to(c_desc.dtype))


@triton.jit
def _weight_gradient(
    a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, first_row_ptr, count_ptr, by_size_ptr, num_experts,
    M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """c[e] = a[:, rows of e] @ b[:, rows of e].T times both scales, or that added to c[e] (fp32) if ADD.

    Tiles are dealt out as in grouped_gemm.py; a tile leaves in four parts, which leaves room for the loop's buffers.
    """
    high: tl.constexpr = (M + BM - 1) // BM
    num_cols: tl.constexpr = (N + BN - 1) // BN
    scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    num_tiles = num_experts * high * num_cols
    for turn in tl.range(0, (num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS):
        place = tl.program_id(0)
        tile = turn * NUM_PROGRAMS + tl.where(turn % 2 == 0, place, NUM_PROGRAMS - 1 - place)
        if tile < num_tiles:
            expert = tl.load(by_size_ptr + tile // (high * num_cols))
            row = tile // num_cols % high * BM
            col = tile % num_cols * BN
            first = tl.load(first_row_ptr + expert)
            count = tl.load(count_ptr + expert)
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for k in range(0, count, BK):
                total = tl.dot(a_desc.load([row, first + k]), b_desc.load([col, first + k]).T, total)
            total *= scale
            left, right = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            part0, part1 = left.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
            part2, part3 = right.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
            put_part(c_desc, expert, row, col, part0, BM, BN // 4, ADD, ADD)
            put_part(c_desc, expert, row, col + BN // 4, part1, BM, BN // 4, ADD, ADD)
            put_part(c_desc, expert, row, col + BN // 2, part2, BM, BN // 4, ADD, ADD)
            put_part(c_desc, expert, row, col + BN // 4 * 3, part3, BM, BN // 4, ADD, ADD)


@triton.jit
def _spread_columns(
    x_ptr, slot_ptr, num_tiles_ptr, out_ptr, width, num_rows,
    TOPK: tl.constexpr, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each row's token as a column: [T, D] to [D, P]; padding inside used tiles is zero."""
    start = tl.program_id(0) * ROWS
    if start < tl.load(num_tiles_ptr) * ROW_TILE:
        row = start + tl.arange(0, ROWS)
        slot = tl.load(slot_ptr + row)
        col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        token = (tl.maximum(slot, 0) // TOPK).to(tl.int64)[:, None]
        values = tl.load(x_ptr + token * width + col, mask=(slot >= 0)[:, None] & (col < width), other=0.0)
        store_transposed(values.to(tl.float32), row.to(tl.int64)[:, None], col, num_rows, width, out_ptr, num_rows)


@triton.jit
def _raise_to(largest_ptr, value):
    """Raises a number to a tile's maximum. Most tiles find it above theirs and need no atomic operation."""
    if value > tl.load(largest_ptr, volatile=True):
        tl.atomic_max(largest_ptr, value)


@triton.jit
def _swiglu_backward_largest(
    grad_ptr, hidden_ptr, row_weight_ptr, slot_ptr, num_tiles_ptr, dweights_ptr, dhidden_largest_ptr,
    activation_largest_ptr, width, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The router weights' gradient, and the largest magnitudes of what ``_swiglu_backward`` quantizes."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(num_tiles_ptr) * ROW_TILE:
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slot_ptr + row)
        weight = tl.load(row_weight_ptr + row)[:, None]
        start = row.to(tl.int64)[:, None] * width
        dweight = tl.zeros([ROWS], dtype=tl.float32)
        dhidden_largest = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        activation_largest = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            inside = col < width
            grad = tl.load(grad_ptr + start + col, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(hidden_ptr + 2 * start + col, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(hidden_ptr + 2 * start + width + col, mask=inside, other=0.0).to(tl.float32)
            activation = gate / (1.0 + tl.exp(-gate)) * up
            dweight += tl.sum(grad * activation, 1)
            dgate, dup = swiglu_gradient(gate, up, grad * weight)
            dhidden_largest = tl.maximum(dhidden_largest, tl.maximum(tl.abs(dgate), tl.abs(dup)))
            activation_largest = tl.maximum(activation_largest, tl.abs(weight * activation))
        tl.store(dweights_ptr + slot, dweight, mask=slot >= 0)
        _raise_to(dhidden_largest_ptr, tl.max(tl.max(dhidden_largest, 1), 0))
        _raise_to(activation_largest_ptr, tl.max(tl.max(activation_largest, 1), 0))


@triton.jit
def _swiglu_backward(
    grad_ptr, hidden_ptr, row_weight_ptr, num_tiles_ptr, dhidden_largest_ptr, dhidden_scale_ptr, dhidden_ptr,
    dhidden_columns_ptr, activation_largest_ptr, activation_scale_ptr, activation_columns_ptr, width, num_rows,
    DHIDDEN_LIMIT: tl.constexpr, ACTIVATION_LIMIT: tl.constexpr,
    ROW_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dhidden [P, 2F] and [2F, P], and weight * activation [F, P], in float8."""
    start = tl.program_id(0) * ROWS
    is_writer = (start == 0) & (tl.program_id(1) == 0)
    dhidden_inverse = inverse_scale(dhidden_largest_ptr, dhidden_scale_ptr, DHIDDEN_LIMIT, is_writer)
    activation_inverse = inverse_scale(activation_largest_ptr, activation_scale_ptr, ACTIVATION_LIMIT, is_writer)
    if start < tl.load(num_tiles_ptr) * ROW_TILE:
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        weight = tl.load(row_weight_ptr + row)
        col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < num_rows) & (col < width)
        grad = tl.load(grad_ptr + row * width + col, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(hidden_ptr + 2 * row * width + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + 2 * row * width + width + col, mask=inside, other=0.0).to(tl.float32)
        activation = gate / (1.0 + tl.exp(-gate)) * up * (weight * activation_inverse)
        store_transposed(activation, row, col, num_rows, width, activation_columns_ptr, num_rows)
        dgate, dup = swiglu_gradient(gate, up, grad * (weight * dhidden_inverse))
        dtype = dhidden_ptr.dtype.element_ty
        tl.store(dhidden_ptr + 2 * row * width + col, dgate.to(dtype), mask=inside)
        tl.store(dhidden_ptr + 2 * row * width + width + col, dup.to(dtype), mask=inside)
        store_transposed(dgate, row, col, num_rows, width, dhidden_columns_ptr, num_rows)
        ups_ptr = dhidden_columns_ptr + width.to(tl.int64) * num_rows
        store_transposed(dup, row, col, num_rows, width, ups_ptr, num_rows)


def _new(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _programs(tensor: Tensor) -> int:
    return hardware(tensor.device).processors


def _quantized_weight(weight_EMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [E, M, N], columns [E, N, M] and scale."""
    experts, height, width = weight_EMN.shape
    rows = _new(weight_EMN, experts, height, width, dtype=FORWARD)
    columns = _new(weight_EMN, experts, width, height, dtype=FORWARD)
    scales = torch.zeros(2, device=weight_EMN.device)
    largest_(scales[1], weight_EMN.view(-1, width), width)
    quantize_(rows, columns, scales[0], scales[1], weight_EMN, width)
    return rows, columns, scales[0]


def _quantized_tokens(x_TD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, scales = _new(x_TD, *x_TD.shape, dtype=dtype), torch.zeros(2, device=x_TD.device)
    largest_(scales[1], x_TD, x_TD.shape[1])
    quantize_(out, None, scales[0], scales[1], x_TD, x_TD.shape[1])
    return out, scales[0]


def _as_rows(x_TD: Tensor, order: PaddedRowOrder, topk: int) -> Tensor:
    return spread_rows(x_TD.view(torch.uint8), order, topk).view(x_TD.dtype)


def _as_columns(x_TD: Tensor, order: PaddedRowOrder, topk: int) -> Tensor:
    rows, width = order.slot_P.shape[0], x_TD.shape[1]
    out = _new(x_TD, width, rows, dtype=x_TD.dtype)
    _spread_columns[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
        x_TD, order.slot_P, order.num_tiles, out, width, rows, TOPK=topk, ROW_TILE=ROW_TILE, ROWS=_ROWS,
        COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


def _multiply(
    a_PK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, order: PaddedRowOrder, dtype: torch.dtype
) -> Tensor:
    """Rows times each row's expert weight, [P, N]."""
    _, width, depth = b_ENK.shape
    out = _new(a_PK, a_PK.shape[0], width, dtype=dtype)
    programs = _programs(a_PK)
    _rows_times_weight[(programs,)](
        TensorDescriptor.from_tensor(a_PK, [_BM, _BK]), TensorDescriptor.from_tensor(b_ENK, [1, _BN, _BK]),
        TensorDescriptor.from_tensor(out, [_BM, _BN]), a_scale, b_scale, order.tile_expert, order.num_tiles, N=width,
        K=depth, BM=_BM, BN=_BN, BK=_BK, NUM_PROGRAMS=programs, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _gradient(
    a_MP: Tensor, a_scale: Tensor, b_NP: Tensor, b_scale: Tensor, order: PaddedRowOrder, weight: Tensor,
    buffer: Tensor | None, accumulate: bool,
) -> Tensor | None:  # fmt: skip
    """The gradient of ``weight`` [E, M, N], or None after it went to the buffer."""
    output, adds = kernel_output(buffer, accumulate, weight.shape, is_padded=False, adds_in_16_bits=False)
    out = torch.empty_like(weight) if output is None else output
    programs = _programs(a_MP)
    _weight_gradient[(programs,)](
        TensorDescriptor.from_tensor(a_MP, [_BM, _BK]), TensorDescriptor.from_tensor(b_NP, [_BN, _BK]),
        TensorDescriptor.from_tensor(out, [1, _BM, _BN // 4]), a_scale, b_scale, order.first_row_E, order.count_E,
        order.by_size_E, weight.shape[0], M=weight.shape[1], N=weight.shape[2], BM=_BM, BN=_BN, BK=_BK,
        NUM_PROGRAMS=programs, ADD=adds, num_warps=8, num_stages=3,
    )  # fmt: skip
    return store_gradient(out, output, buffer, accumulate)


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``. Kept are hidden [P, 2F] in 16 bits, and x and both weights in float8."""
    topk, inner = indices_TK.shape[1], down_EDF.shape[2]
    order = order_rows(indices_TK, down_EDF.shape[0])
    x, x_scale = _quantized_tokens(x_TD.contiguous(), FORWARD)
    gate_up, gate_up_columns, gate_up_scale = kept([gate_up_E2FD], lambda: _quantized_weight(gate_up_E2FD.contiguous()))
    hidden = _multiply(_as_rows(x, order, topk), x_scale, gate_up, gate_up_scale, order, x_TD.dtype)
    del gate_up
    activation, scales = _new(x, hidden.shape[0], inner, dtype=FORWARD), torch.zeros(2, device=x.device)
    largest_(scales[1], hidden, inner, num_tiles=order.num_tiles, swiglu=True)
    quantize_(activation, None, scales[0], scales[1], hidden, inner, num_tiles=order.num_tiles, swiglu=True)
    down, down_columns, down_scale = kept([down_EDF], lambda: _quantized_weight(down_EDF.contiguous()))
    y_rows = _multiply(activation, scales[0], down, down_scale, order, x_TD.dtype)
    y = sum_rows(y_rows, order, weights_TK.contiguous(), topk, out=torch.empty_like(x_TD))
    return y, [hidden, x, x_scale, gate_up_columns, gate_up_scale, down_columns, down_scale, *order]


def moe_mlp_backward_inputs(
    dy_TD: Tensor, arguments: list[Tensor], saved: list[Tensor], down_buffer: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``."""
    hidden, _, _, gate_up_columns, gate_up_scale, down_columns, down_scale, *rest = saved
    order, dtype, weights = PaddedRowOrder(*rest), dy_TD.dtype, arguments[3].contiguous()
    topk, rows, inner = weights.shape[1], hidden.shape[0], hidden.shape[1] // 2
    dy, dy_scale = _quantized_tokens(dy_TD.contiguous(), GRADIENT)
    dy_rows, row_weight = spread_rows_and_weights(dy.view(torch.uint8), order, weights)
    grad = _multiply(dy_rows.view(GRADIENT), dy_scale, down_columns, down_scale, order, dtype)
    del dy_rows
    numbers = torch.zeros(4, device=dy.device)
    dweights = torch.zeros_like(weights)
    _swiglu_backward_largest[(triton.cdiv(rows, 8),)](
        grad, hidden, row_weight, order.slot_P, order.num_tiles, dweights, numbers[0], numbers[1], inner,
        ROW_TILE=ROW_TILE, ROWS=8, BLOCK=256, num_warps=8,
    )  # fmt: skip
    dhidden = _new(dy, rows, 2 * inner, dtype=GRADIENT)
    dhidden_columns = _new(dy, 2 * inner, rows, dtype=GRADIENT)
    activation_columns = _new(dy, inner, rows, dtype=FORWARD)
    _swiglu_backward[(triton.cdiv(rows, _BACKWARD_TILE), triton.cdiv(inner, _BACKWARD_TILE))](
        grad, hidden, row_weight, order.num_tiles, numbers[0], numbers[2], dhidden, dhidden_columns, numbers[1],
        numbers[3], activation_columns, inner, rows, DHIDDEN_LIMIT=torch.finfo(GRADIENT).max,
        ACTIVATION_LIMIT=torch.finfo(FORWARD).max, ROW_TILE=ROW_TILE, ROWS=_BACKWARD_TILE, COLUMNS=_BACKWARD_TILE,
        num_warps=4,
    )  # fmt: skip
    del grad
    dx_rows = _multiply(dhidden, numbers[2], gate_up_columns, gate_up_scale, order, dtype)
    dx = sum_rows(dx_rows, order, None, topk, out=torch.empty_like(dy_TD))
    dy_columns = _as_columns(dy, order, topk)
    ddown = _gradient(
        dy_columns, dy_scale, activation_columns, numbers[3], order, arguments[2], down_buffer, accumulate
    )
    return dx, ddown, dweights, [dhidden_columns, numbers]


def moe_mlp_backward_up_weights(
    arguments: list[Tensor],
    saved: list[Tensor],
    pending: list[Tensor],
    gate_up_buffer: Tensor | None,
    accumulate: bool,
) -> Tensor | None:
    """See ``fused_moe.MoeKernels``."""
    dhidden_columns, numbers = pending
    order = PaddedRowOrder(*saved[7:])
    x_columns = _as_columns(saved[1], order, arguments[4].shape[1])
    return _gradient(dhidden_columns, numbers[2], x_columns, saved[2], order, arguments[1], gate_up_buffer, accumulate)
