# mypy: disable-error-code=no-untyped-def
"""Grouped matrix products over rows in expert order: persistent grids, tiles by the tensor memory engine
where there is one, fused SwiGLU. Sizes of tiles: tiles.py.

Legend: P rows (padded per expert, see row_order.py), D model width, F inner width, E experts. Sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.optimus.ops.triton.candidates import Tiles
from megatron.optimus.ops.triton.row_order import PaddedRowOrder
from megatron.optimus.ops.triton.tiles import ROW_TILE, hardware, num_programs, tiles_for


@triton.jit
def _matrix(tensor, height, WIDTH: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, BY_ENGINE: tl.constexpr):
    """[height, WIDTH] in tiles: the host's descriptor for the memory engine, else a pointer, described here.

    The strides of a descriptor from the host are unknown when a kernel is compiled. Without the engine it would be read
    two bytes at a time; with the constants here such a GPU copies 16 bytes at a time and ahead of their use.
    """
    if BY_ENGINE:
        return tensor
    else:
        return tl.make_tensor_descriptor(tensor, [height, WIDTH], [WIDTH, 1], [B0, B1])


@triton.jit
def _matrices(
    tensor, count, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    BY_ENGINE: tl.constexpr,
):  # fmt: skip
    """[count, HEIGHT, WIDTH], as ``_matrix``."""
    if BY_ENGINE:
        return tensor
    else:
        return tl.make_tensor_descriptor(tensor, [count, HEIGHT, WIDTH], [HEIGHT * WIDTH, WIDTH, 1], [B0, B1, B2])


@triton.jit
def _gate_and_up(
    tensor, count, F: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_ENGINE: tl.constexpr
):
    """[count, 2, F, D], as ``_matrix``."""
    if BY_ENGINE:
        return tensor
    else:
        return tl.make_tensor_descriptor(tensor, [count, 2, F, D], [2 * F * D, F * D, D, 1], [1, 2, BN, BK])


@triton.jit
def _store_swiglu(
    hidden_ptr, hidden_row, activation_desc, row, col, gate, up, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    dtype = activation_desc.dtype
    activation_desc.store([row, col], (gate / (1.0 + tl.exp(-gate)) * up).to(dtype))
    column = (col + tl.arange(0, BN))[None, :]
    inside = (hidden_row >= 0)[:, None] & (column < F)
    start = hidden_ptr + hidden_row.to(tl.int64)[:, None] * (2 * F) + column
    tl.store(start, gate.to(dtype), mask=inside)
    tl.store(start + F, up.to(dtype), mask=inside)


@triton.jit
def _up_swiglu(
    x, gate_up, hidden_ptr, activation, slot_ptr, tile_expert_ptr, tile_shift_ptr, num_tiles_ptr, num_rows, num_experts,
    F: tl.constexpr, D: tl.constexpr, ROW_TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BY_ENGINE: tl.constexpr, WITHOUT_PADDING: tl.constexpr,
):  # fmt: skip
    """hidden[p] = x[p] @ gate_up[e].T and activation = silu(gate) * up. gate_up is [E, 2, F, D], hidden [P, 2, F] or,
    WITHOUT_PADDING, [N, 2, F].

    One product of 2*BN columns, gate beside up: two products of BN columns each would read x twice (22% slower).
    Results leave in halves, which leaves room for a fourth stage of the loop. hidden leaves row by row: after the last
    slot of an expert come the rows of the next one, which a block would overwrite.
    """
    x_desc = _matrix(x, num_rows, D, BM, BK, BY_ENGINE)
    gate_up_desc = _gate_and_up(gate_up, num_experts, F, D, BN, BK, BY_ENGINE)
    activation_desc = _matrix(activation, num_rows, F, BM, BN // 2, BY_ENGINE)
    num_cols: tl.constexpr = (F + BN - 1) // BN
    parts: tl.constexpr = ROW_TILE // BM
    num_tiles = tl.load(num_tiles_ptr) * (parts * num_cols)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row = tile // num_cols * BM
        col = tile % num_cols * BN
        expert = tl.load(tile_expert_ptr + tile // (parts * num_cols))
        total = tl.zeros((BM, 2 * BN), dtype=tl.float32)
        for k in range(0, D, BK):
            weight = gate_up_desc.load([expert, 0, col, k]).reshape(2 * BN, BK)
            total = tl.dot(x_desc.load([row, k]), weight.T, total)
        gate_part, up_part = total.reshape(BM, 2, BN).permute(0, 2, 1).split()
        gate0, gate1 = gate_part.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        up0, up1 = up_part.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        hidden_row = row + tl.arange(0, BM)
        if WITHOUT_PADDING:
            slot = tl.load(slot_ptr + hidden_row)
            hidden_row = tl.where(slot >= 0, hidden_row - tl.load(tile_shift_ptr + tile // (parts * num_cols)), -1)
        _store_swiglu(hidden_ptr, hidden_row, activation_desc, row, col, gate0, up0, F, BM, BN // 2)
        _store_swiglu(hidden_ptr, hidden_row, activation_desc, row, col + BN // 2, gate1, up1, F, BM, BN // 2)


@triton.jit
def _rows_times_weight(
    a, b, c, tile_expert_ptr, num_tiles_ptr, num_rows, num_experts, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROW_TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BY_ENGINE: tl.constexpr,
):  # fmt: skip
    """c[p] = a[p] @ b[e].T if TRANSPOSED (b is [E, N, K]), else a[p] @ b[e] (b is [E, K, N])."""
    a_desc = _matrix(a, num_rows, K, BM, BK, BY_ENGINE)
    c_desc = _matrix(c, num_rows, N, BM, BN, BY_ENGINE)
    if TRANSPOSED:
        b_desc = _matrices(b, num_experts, N, K, 1, BN, BK, BY_ENGINE)
    else:
        b_desc = _matrices(b, num_experts, K, N, 1, BK, BN, BY_ENGINE)
    num_cols: tl.constexpr = (N + BN - 1) // BN
    parts: tl.constexpr = ROW_TILE // BM
    num_tiles = tl.load(num_tiles_ptr) * (parts * num_cols)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row = tile // num_cols * BM
        col = tile % num_cols * BN
        expert = tl.load(tile_expert_ptr + tile // (parts * num_cols))
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            if TRANSPOSED:
                weight = b_desc.load([expert, col, k]).reshape(BN, BK).T
            else:
                weight = b_desc.load([expert, k, col]).reshape(BK, BN)
            total = tl.dot(a_desc.load([row, k]), weight, total)
        c_desc.store([row, col], total.to(c_desc.dtype))


@triton.jit
def put_part(
    c_desc, expert, row, col, part, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr, BY_COPY: tl.constexpr
):
    """BY_COPY (fp32): the copy engine adds, each element once, so the order of tiles cannot matter; else added here."""
    if not ADD:
        c_desc.store([expert, row, col], part.to(c_desc.dtype).reshape(1, BM, BN))
    elif BY_COPY:
        c_desc.atomic_add([expert, row, col], part.reshape(1, BM, BN))
    else:
        old = c_desc.load([expert, row, col]).reshape(BM, BN).to(tl.float32)
        c_desc.store([expert, row, col], (old + part).to(c_desc.dtype).reshape(1, BM, BN))


@triton.jit
def _weight_gradient(
    a, b, c, first_row_ptr, count_ptr, by_size_ptr, num_rows, num_experts, M: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ADD: tl.constexpr,
    IN_PARTS: tl.constexpr, BY_COPY: tl.constexpr, BY_ENGINE: tl.constexpr,
):  # fmt: skip
    """c[e] = a[rows of e].T @ b[rows of e], or that added to c[e] if ADD; an expert without rows gets, or adds, zero.

    A tile takes as long as its expert has rows. Tiles are dealt out longest first, forth and back over the programs, so
    that all end together however the router chooses. IN_PARTS, which ADD needs and an fp32 c: a tile leaves in four
    parts, as a whole one in fp32 would not fit beside the buffers of the loop.
    """
    a_desc = _matrix(a, num_rows, M, BK, BM, BY_ENGINE)
    b_desc = _matrix(b, num_rows, N, BK, BN, BY_ENGINE)
    c_desc = _matrices(c, num_experts, M, N, 1, BM, BN // 4 if IN_PARTS else BN, BY_ENGINE)
    high: tl.constexpr = (M + BM - 1) // BM
    num_cols: tl.constexpr = (N + BN - 1) // BN
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
                total = tl.dot(a_desc.load([first + k, row]).T, b_desc.load([first + k, col]), total)
            if IN_PARTS:
                left, right = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                part0, part1 = left.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
                part2, part3 = right.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
                put_part(c_desc, expert, row, col, part0, BM, BN // 4, ADD, BY_COPY)
                put_part(c_desc, expert, row, col + BN // 4, part1, BM, BN // 4, ADD, BY_COPY)
                put_part(c_desc, expert, row, col + BN // 2, part2, BM, BN // 4, ADD, BY_COPY)
                put_part(c_desc, expert, row, col + BN // 4 * 3, part3, BM, BN // 4, ADD, BY_COPY)
            else:
                c_desc.store([expert, row, col], total.to(c_desc.dtype).reshape(1, BM, BN))


def _tensor(tensor: Tensor, block: list[int], by_engine: bool) -> Any:
    return TensorDescriptor.from_tensor(tensor, block) if by_engine else tensor


def up_swiglu(
    x_PD: Tensor,
    gate_up_E2FD: Tensor,
    order: PaddedRowOrder,
    tiles: Tiles | None = None,
    *,
    without_padding: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden [P, 2F] before SwiGLU, or [N, 2F] with the rows of slots alone, and activation [P, F].

    ``tiles``: other than those chosen for the shape. Foreign slots leave the last rows of [N, 2F] unwritten.
    """
    num_experts, width, inner = gate_up_E2FD.shape[0], x_PD.shape[1], gate_up_E2FD.shape[1] // 2
    hidden = x_PD.new_empty(order.row_N.numel() if without_padding else x_PD.shape[0], 2 * inner)
    activation = x_PD.new_empty(x_PD.shape[0], inner)
    tiles = tiles or tiles_for("up_swiglu", x_PD, num_experts, inner, width, order.row_N.numel())
    bm, bn, bk, warps, stages, _ = tiles
    programs, engine = num_programs(tiles, x_PD.device), hardware(x_PD.device).has_tma
    _up_swiglu[(programs,)](
        _tensor(x_PD, [bm, bk], engine),
        _tensor(gate_up_E2FD.view(num_experts, 2, inner, width), [1, 2, bn, bk], engine),
        hidden, _tensor(activation, [bm, bn // 2], engine), order.slot_P, order.tile_expert, order.tile_shift,
        order.num_tiles, x_PD.shape[0], num_experts, F=inner, D=width, ROW_TILE=ROW_TILE, BM=bm, BN=bn, BK=bk,
        NUM_PROGRAMS=programs, BY_ENGINE=engine, WITHOUT_PADDING=without_padding, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return hidden, activation


def rows_times_weight(
    a_PK: Tensor, weight: Tensor, order: PaddedRowOrder, *, transposed: bool, tiles: Tiles | None = None
) -> Tensor:
    """[P, K] times each row's expert weight: weight[e].T if transposed ([E, N, K]), else weight[e] ([E, K, N])."""
    depth, width = a_PK.shape[1], weight.shape[1] if transposed else weight.shape[2]
    out = a_PK.new_empty(a_PK.shape[0], width)
    kernel = "rows_times_weight_t" if transposed else "rows_times_weight"
    tiles = tiles or tiles_for(kernel, a_PK, weight.shape[0], width, depth, order.row_N.numel())
    bm, bn, bk, warps, stages, _ = tiles
    programs, engine = num_programs(tiles, a_PK.device), hardware(a_PK.device).has_tma
    _rows_times_weight[(programs,)](
        _tensor(a_PK, [bm, bk], engine), _tensor(weight, [1, bn, bk] if transposed else [1, bk, bn], engine),
        _tensor(out, [bm, bn], engine), order.tile_expert, order.num_tiles, a_PK.shape[0], weight.shape[0],
        N=width, K=depth, TRANSPOSED=transposed, ROW_TILE=ROW_TILE, BM=bm, BN=bn, BK=bk, NUM_PROGRAMS=programs,
        BY_ENGINE=engine, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def weight_gradient(
    a_PM: Tensor,
    b_PN: Tensor,
    order: PaddedRowOrder,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
    *,
    accumulate: bool = True,
) -> Tensor:
    """[E, M, N]: a.T @ b over the rows of each expert.

    With ``out``, a main gradient in fp32 or a's dtype, the products are added to it in the kernel's epilogue: the sum
    is formed in fp32 and rounded once to out's dtype. Without ``accumulate`` they are written over all of it, whatever
    was there. Returns out. Raises ValueError if out does not fit.
    """
    num_experts, height, width = order.count_E.shape[0], a_PM.shape[1], b_PN.shape[1]
    add, wide = out is not None and accumulate, out is not None and out.dtype == torch.float32
    if out is None:
        out = a_PM.new_empty(num_experts, height, width)
    elif (
        out.shape != (num_experts, height, width)
        or out.dtype not in (torch.float32, a_PM.dtype)
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"weight_gradient: out {tuple(out.shape)} {out.dtype}, contiguous: {out.is_contiguous()}; expected a "
            f"contiguous {(num_experts, height, width)} in float32 or {a_PM.dtype}"
        )
    # Written in fp32 a tile leaves as it does where it is added, and the tiles that are best there serve.
    kernel = "weight_gradient_add_fp32" if wide else "weight_gradient_add" if add else "weight_gradient"
    tiles = tiles or tiles_for(kernel, a_PM, num_experts, height, width, order.row_N.numel())
    bm, bn, bk, warps, stages, _ = tiles
    programs, engine = num_programs(tiles, a_PM.device), hardware(a_PM.device).has_tma
    _weight_gradient[(programs,)](
        _tensor(a_PM, [bk, bm], engine), _tensor(b_PN, [bk, bn], engine),
        _tensor(out, [1, bm, bn // 4 if add or wide else bn], engine),
        order.first_row_E, order.count_E, order.by_size_E, a_PM.shape[0], num_experts, M=height, N=width,
        BM=bm, BN=bn, BK=bk, NUM_PROGRAMS=programs, ADD=add, IN_PARTS=add or wide, BY_ENGINE=engine,
        BY_COPY=engine and add and wide and out.is_cuda,  # Triton's interpreter has no such copy
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
