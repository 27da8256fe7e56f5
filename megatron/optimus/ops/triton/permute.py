# mypy: disable-error-code=no-untyped-def
"""Permute tokens into expert order and sum them back (unpermute); SwiGLU's backward. Bound by memory bandwidth."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.candidates import Tiles
from megatron.optimus.ops.triton.row_order import PaddedRowOrder
from megatron.optimus.ops.triton.tiles import ROW_TILE, tiles_for


@triton.jit
def _spread(
    x_ptr, row_ptr, weights_ptr, first_row_ptr, count_ptr, out_ptr, row_weight_ptr, width, num_experts,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, ROW_TILE: tl.constexpr, BLOCK: tl.constexpr, WITH_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The first E programs clear the padding rows of an expert; each later one reads a token and writes its rows."""
    col = tl.arange(0, BLOCK)
    if tl.program_id(0) < num_experts:
        expert = tl.program_id(0)
        count = tl.load(count_ptr + expert)
        first = tl.load(first_row_ptr + expert)
        zeros = tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty)
        for pad in range(count, (count + ROW_TILE - 1) // ROW_TILE * ROW_TILE):
            row = (first + pad).to(tl.int64)
            if WITH_WEIGHT:
                tl.store(row_weight_ptr + row, 0.0)
            for start in range(0, width, BLOCK):
                tl.store(out_ptr + row * width + start + col, zeros, mask=start + col < width)
    else:
        token = (tl.program_id(0) - num_experts).to(tl.int64)
        k = tl.arange(0, SLOTS)
        rows = tl.load(row_ptr + token * TOPK + k, mask=k < TOPK, other=-1)
        if tl.max(rows, 0) >= 0:
            if WITH_WEIGHT:
                weights = tl.load(weights_ptr + token * TOPK + k, mask=k < TOPK)
                tl.store(row_weight_ptr + rows, weights, mask=rows >= 0)
            for start in range(0, width, BLOCK):
                inside = start + col < width
                values = tl.load(x_ptr + token * width + start + col, mask=inside)
                for i in tl.static_range(TOPK):
                    row = tl.load(row_ptr + token * TOPK + i).to(tl.int64)
                    place = out_ptr + row * width + start + col
                    tl.store(
                        place, values, mask=inside & (row >= 0), cache_modifier=".cs"
                    )  # much is written before it is read


def _block(width: int, most: int) -> int:
    """Columns that a program handles at once: they divide the width where that leaves them wide enough."""
    divisor = width & -width
    return min(divisor if divisor >= 512 else triton.next_power_of_2(width), most)


def spread_rows(
    x_TD: Tensor, order: PaddedRowOrder, topk: int, out: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Each row's token: [P, D]. Padding inside used tiles is zero; tiles after the last used one stay unwritten.

    ``tiles``, here and below: other than those chosen for the shape.
    """
    out_PD = x_TD.new_empty(order.slot_P.shape[0], x_TD.shape[1]) if out is None else out
    _launch_spread(x_TD, order, topk, out_PD, None, None, tiles)
    return out_PD


def spread_rows_and_weights(x_TD: Tensor, order: PaddedRowOrder, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """``spread_rows`` and the router weight of each row, fp32 [P]; zero for padding rows."""
    out_PD = x_TD.new_empty(order.slot_P.shape[0], x_TD.shape[1])
    row_weight_P = weights_TK.new_empty(order.slot_P.shape[0])
    _launch_spread(x_TD, order, weights_TK.shape[1], out_PD, weights_TK, row_weight_P)
    return out_PD, row_weight_P


def _launch_spread(
    x_TD: Tensor, order: PaddedRowOrder, topk: int, out_PD: Tensor, weights_TK: Tensor | None,
    row_weight_P: Tensor | None, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    (num_tokens, width), num_experts = x_TD.shape, order.count_E.shape[0]
    tiles = tiles or tiles_for("spread_rows", x_TD, num_experts, topk, width, order.row_N.numel())
    _spread[(num_tokens + num_experts,)](
        x_TD, order.row_N, weights_TK, order.first_row_E, order.count_E, out_PD, row_weight_P, width, num_experts,
        TOPK=topk, SLOTS=triton.next_power_of_2(topk), ROW_TILE=ROW_TILE,
        BLOCK=_block(width, tiles.cols), WITH_WEIGHT=weights_TK is not None, num_warps=tiles.warps,
    )  # fmt: skip


@triton.jit
def _sum_rows(
    rows_ptr, row_ptr, weights_ptr, out_ptr, width,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for k in tl.static_range(TOPK):
            row = tl.load(row_ptr + token * TOPK + k)
            mask = (col < width) & (row >= 0)
            values = tl.load(rows_ptr + row.to(tl.int64) * width + col, mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                values *= tl.load(weights_ptr + token * TOPK + k, mask=row >= 0, other=0.0)
            total += values
        tl.store(out_ptr + token.to(tl.int64) * width + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


def sum_rows(
    rows_PD: Tensor,
    order: PaddedRowOrder,
    weights_TK: Tensor | None,
    topk: int,
    out: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """out [T, D] = each token's sum over its local slots of (weight *) row, in slot order and fp32; returns it."""
    tiles = tiles or tiles_for("sum_rows", rows_PD, order.count_E.shape[0], topk, out.shape[1], order.row_N.numel())
    _launch_sum(rows_PD, order.row_N, weights_TK, topk, out, tiles)
    return out


def _launch_sum(rows: Tensor, row_N: Tensor, weights_TK: Tensor | None, topk: int, out: Tensor, tiles: Tiles) -> None:
    num_tokens, width = out.shape
    _sum_rows[(num_tokens,)](
        rows, row_N, weights_TK, out, width, TOPK=topk, BLOCK=_block(width, tiles.cols),
        WEIGHTED=weights_TK is not None, num_warps=tiles.warps,
    )  # fmt: skip


def copy_rows(x_TD: Tensor, positions_TP: Tensor, num_copies: int) -> Tensor:
    """``spread_rows`` to given positions: no experts, so no padding between them."""
    out_SD = x_TD.new_empty(num_copies, x_TD.shape[1])
    (num_rows, width), num_places = x_TD.shape, positions_TP.shape[1]
    if out_SD.numel() > 0:
        tiles = tiles_for("spread_rows", x_TD, 0, num_places, width, num_copies)
        _spread[(num_rows,)](
            x_TD, positions_TP, None, positions_TP, positions_TP, out_SD, None, width, 0,
            TOPK=num_places, SLOTS=triton.next_power_of_2(num_places), ROW_TILE=ROW_TILE,
            BLOCK=_block(width, tiles.cols), WITH_WEIGHT=False, num_warps=tiles.warps,
        )  # fmt: skip
    return out_SD


def sum_copies(y_SD: Tensor, positions_TP: Tensor) -> Tensor:
    """Each row's sum over its positions, in their order and fp32: [S, D] -> [T, D]."""
    out_TD = y_SD.new_empty(positions_TP.shape[0], y_SD.shape[1])
    if out_TD.numel() > 0:
        tiles = tiles_for("sum_rows", y_SD, 0, positions_TP.shape[1], out_TD.shape[1], y_SD.shape[0])
        _launch_sum(y_SD, positions_TP, None, positions_TP.shape[1], out_TD, tiles)
    return out_TD


@triton.jit
def _swiglu_backward(
    grad_ptr, hidden_ptr, dhidden_ptr, row_weight_ptr, slot_ptr, tile_shift_ptr, dweights_ptr, num_tiles_ptr,
    num_hidden, width, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    hidden_row = row - tl.load(tile_shift_ptr + first // ROW_TILE)
    if first < tl.load(num_tiles_ptr) * ROW_TILE:
        slot = tl.load(slot_ptr + row)
        weight = tl.load(row_weight_ptr + row)[:, None]
        start = row.to(tl.int64)[:, None] * width
        # A row of no slot reads some other row and drops it: a mask would make these loads wait for the slots.
        before = hidden_ptr + 2 * width * tl.minimum(hidden_row, num_hidden - 1).to(tl.int64)[:, None]
        used = (slot >= 0)[:, None]
        dweight = tl.zeros([ROWS], dtype=tl.float32)
        for begin in range(0, width, BLOCK):
            col = begin + tl.arange(0, BLOCK)[None, :]
            inside = col < width
            da = tl.load(grad_ptr + start + col, mask=inside, other=0.0).to(tl.float32)
            gate = tl.where(used, tl.load(before + col, mask=inside, other=0.0).to(tl.float32), 0.0)
            up = tl.where(used, tl.load(before + width + col, mask=inside, other=0.0).to(tl.float32), 0.0)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            activation = silu * up
            dweight += tl.sum(da * activation, 1)
            da *= weight
            dtype = grad_ptr.dtype.element_ty
            tl.store(grad_ptr + start + col, (weight * activation).to(dtype), mask=inside)
            dgate = da * up * (sigmoid + silu * (1.0 - sigmoid))
            tl.store(dhidden_ptr + 2 * start + col, dgate.to(dtype), mask=inside)
            tl.store(dhidden_ptr + 2 * start + width + col, (da * silu).to(dtype), mask=inside)
        tl.store(dweights_ptr + slot, dweight, mask=slot >= 0)


def swiglu_backward_(
    grad_PF: Tensor,
    hidden_N2F: Tensor,
    row_weight_P: Tensor,
    order: PaddedRowOrder,
    topk: int,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """From the gradient of the unweighted activation: dhidden [P, 2F] and the router weights' gradient, fp32 [T, K].

    ``hidden_N2F``: as ``grouped_gemm.up_swiglu`` gives it without padding.

    ``grad_PF`` becomes weight * activation, which the gradient of the down projection needs. A kernel of its own,
    because the same work in the epilogue of the product before it takes longer there (2.7 ms against 1.5 + 0.8 ms on an
    H200 at T = 32,768, D 2048, F 1024, E 64, K 8): without warp specialisation the tensor cores wait for it.
    """
    num_rows, width = grad_PF.shape
    dhidden_P2F = grad_PF.new_empty(num_rows, 2 * width)
    dweights_TK = row_weight_P.new_zeros(order.row_N.shape[0] // topk, topk)
    tiles = tiles or tiles_for("swiglu_backward", grad_PF, order.count_E.shape[0], 1, width, order.row_N.numel())
    _swiglu_backward[(num_rows // tiles.rows,)](
        grad_PF, hidden_N2F, dhidden_P2F, row_weight_P, order.slot_P, order.tile_shift, dweights_TK, order.num_tiles,
        hidden_N2F.shape[0], width, ROW_TILE=ROW_TILE, ROWS=tiles.rows, BLOCK=_block(width, tiles.cols),
        num_warps=tiles.warps,
    )  # fmt: skip
    return dhidden_P2F, dweights_TK
