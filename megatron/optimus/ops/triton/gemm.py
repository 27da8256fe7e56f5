# mypy: disable-error-code=no-untyped-def
"""Grouped matrix products over rows in expert order: persistent grids, tiles by the tensor memory engine, fused SwiGLU.

Legend: P rows (padded per expert, see index.py), D model width, F inner width, E experts. Sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.optimus.ops.triton.index import ROW_TILE, RowOrder

_DEPTH = 64


@triton.jit
def _store_swiglu(hidden_desc, activation_desc, row, col, gate, up, BM: tl.constexpr, BN: tl.constexpr):
    dtype = activation_desc.dtype
    hidden_desc.store([row, 0, col], gate.to(dtype).reshape(BM, 1, BN))
    hidden_desc.store([row, 1, col], up.to(dtype).reshape(BM, 1, BN))
    activation_desc.store([row, col], (gate / (1.0 + tl.exp(-gate)) * up).to(dtype))


@triton.jit
def _up_swiglu(
    x_desc, gate_up_desc, hidden_desc, activation_desc, tile_expert_ptr, num_tiles_ptr,
    F: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """hidden[p] = x[p] @ gate_up[e].T and activation = silu(gate) * up. gate_up is [E, 2, F, D], hidden [P, 2, F].

    One product of 2*BN columns, gate beside up: two products of BN columns each would read x twice (22% slower).
    Results leave in halves, which leaves room for a fourth stage of the loop.
    """
    num_cols: tl.constexpr = (F + BN - 1) // BN
    num_tiles = tl.load(num_tiles_ptr) * num_cols
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row = tile // num_cols * BM
        col = tile % num_cols * BN
        expert = tl.load(tile_expert_ptr + tile // num_cols)
        total = tl.zeros((BM, 2 * BN), dtype=tl.float32)
        for k in range(0, D, BK):
            weight = gate_up_desc.load([expert, 0, col, k]).reshape(2 * BN, BK)
            total = tl.dot(x_desc.load([row, k]), weight.T, total)
        gate, up = total.reshape(BM, 2, BN).permute(0, 2, 1).split()
        gate0, gate1 = gate.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        up0, up1 = up.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _store_swiglu(hidden_desc, activation_desc, row, col, gate0, up0, BM, BN // 2)
        _store_swiglu(hidden_desc, activation_desc, row, col + BN // 2, gate1, up1, BM, BN // 2)


@triton.jit
def _rows_times_weight(
    a_desc, b_desc, c_desc, tile_expert_ptr, num_tiles_ptr, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[p] = a[p] @ b[e].T if TRANSPOSED (b is [E, N, K]), else a[p] @ b[e] (b is [E, K, N])."""
    num_cols: tl.constexpr = (N + BN - 1) // BN
    num_tiles = tl.load(num_tiles_ptr) * num_cols
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, flatten=True):
        row = tile // num_cols * BM
        col = tile % num_cols * BN
        expert = tl.load(tile_expert_ptr + tile // num_cols)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            a = a_desc.load([row, k])
            if TRANSPOSED:
                b = b_desc.load([expert, col, k]).reshape(BN, BK).T
            else:
                b = b_desc.load([expert, k, col]).reshape(BK, BN)
            total = tl.dot(a, b, total)
        c_desc.store([row, col], total.to(c_desc.dtype))


@triton.jit
def _add_store(c_desc, expert, row, col, part, BM: tl.constexpr, BN: tl.constexpr, BY_COPY: tl.constexpr):
    """BY_COPY (fp32): the copy engine adds, each element once, so the order of tiles cannot matter; else added here."""
    if BY_COPY:
        c_desc.atomic_add([expert, row, col], part.reshape(1, BM, BN))
    else:
        old = c_desc.load([expert, row, col]).reshape(BM, BN).to(tl.float32)
        c_desc.store([expert, row, col], (old + part).to(c_desc.dtype).reshape(1, BM, BN))


@triton.jit
def _weight_gradient(
    a_desc, b_desc, c_desc, first_row_ptr, count_ptr, by_size_ptr, num_experts, M: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ADD: tl.constexpr,
    BY_COPY: tl.constexpr,
):  # fmt: skip
    """c[e] = a[rows of e].T @ b[rows of e], or that added to c[e] if ADD; an expert without rows gets, or adds, zero.

    A tile takes as long as its expert has rows. Tiles are dealt out longest first, forth and back over the programs, so
    that all end together however the router chooses. ADD goes through c in four parts: a whole fp32 tile would not fit
    beside the buffers of the loop.
    """
    num_rows: tl.constexpr = (M + BM - 1) // BM
    num_cols: tl.constexpr = (N + BN - 1) // BN
    num_tiles = num_experts * num_rows * num_cols
    for turn in tl.range(0, (num_tiles + NUM_PROGRAMS - 1) // NUM_PROGRAMS):
        place = tl.program_id(0)
        tile = turn * NUM_PROGRAMS + tl.where(turn % 2 == 0, place, NUM_PROGRAMS - 1 - place)
        if tile < num_tiles:
            expert = tl.load(by_size_ptr + tile // (num_rows * num_cols))
            row = tile // num_cols % num_rows * BM
            col = tile % num_cols * BN
            first = tl.load(first_row_ptr + expert)
            count = tl.load(count_ptr + expert)
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for k in range(0, count, BK):
                total = tl.dot(a_desc.load([first + k, row]).T, b_desc.load([first + k, col]), total)
            if ADD:
                left, right = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                part0, part1 = left.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
                part2, part3 = right.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
                _add_store(c_desc, expert, row, col, part0, BM, BN // 4, BY_COPY)
                _add_store(c_desc, expert, row, col + BN // 4, part1, BM, BN // 4, BY_COPY)
                _add_store(c_desc, expert, row, col + BN // 2, part2, BM, BN // 4, BY_COPY)
                _add_store(c_desc, expert, row, col + BN // 4 * 3, part3, BM, BN // 4, BY_COPY)
            else:
                c_desc.store([expert, row, col], total.to(c_desc.dtype).reshape(1, BM, BN))


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _desc(tensor: Tensor, block: list[int]) -> Any:
    return TensorDescriptor.from_tensor(tensor, block)


def up_swiglu(x_PD: Tensor, gate_up_E2FD: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    """hidden [P, 2F] before SwiGLU and activation [P, F]."""
    num_experts, width, inner = gate_up_E2FD.shape[0], x_PD.shape[1], gate_up_E2FD.shape[1] // 2
    hidden = x_PD.new_empty(x_PD.shape[0], 2 * inner)
    activation = x_PD.new_empty(x_PD.shape[0], inner)
    bn, programs = 128, _programs(x_PD.device)
    _up_swiglu[(programs,)](
        _desc(x_PD, [ROW_TILE, _DEPTH]), _desc(gate_up_E2FD.view(num_experts, 2, inner, width), [1, 2, bn, _DEPTH]),
        _desc(hidden.view(-1, 2, inner), [ROW_TILE, 1, bn // 2]), _desc(activation, [ROW_TILE, bn // 2]),
        order.tile_expert, order.num_tiles, F=inner, D=width, BM=ROW_TILE, BN=bn, BK=_DEPTH, NUM_PROGRAMS=programs,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    return hidden, activation


def rows_times_weight(a_PK: Tensor, weight: Tensor, order: RowOrder, *, transposed: bool) -> Tensor:
    """[P, K] times each row's expert weight: weight[e].T if transposed ([E, N, K]), else weight[e] ([E, K, N])."""
    depth, width = a_PK.shape[1], weight.shape[1] if transposed else weight.shape[2]
    out = a_PK.new_empty(a_PK.shape[0], width)
    bn, programs = 256, _programs(a_PK.device)
    _rows_times_weight[(programs,)](
        _desc(a_PK, [ROW_TILE, _DEPTH]), _desc(weight, [1, bn, _DEPTH] if transposed else [1, _DEPTH, bn]),
        _desc(out, [ROW_TILE, bn]), order.tile_expert, order.num_tiles, N=width, K=depth, TRANSPOSED=transposed,
        BM=ROW_TILE, BN=bn, BK=_DEPTH, NUM_PROGRAMS=programs, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def weight_gradient(a_PM: Tensor, b_PN: Tensor, order: RowOrder, out: Tensor | None = None) -> Tensor:
    """[E, M, N]: a.T @ b over the rows of each expert.

    With ``out``, a main gradient in fp32 or a's dtype, the products are added to it in the kernel's epilogue: the sum
    is formed in fp32 and rounded once to out's dtype. Returns out. Raises ValueError if out does not fit.
    """
    num_experts, height, width = order.count_E.shape[0], a_PM.shape[1], b_PN.shape[1]
    bm, bn, programs, add = 128, 256, _programs(a_PM.device), out is not None
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
    _weight_gradient[(programs,)](
        _desc(a_PM, [_DEPTH, bm]), _desc(b_PN, [_DEPTH, bn]), _desc(out, [1, bm, bn // 4 if add else bn]),
        order.first_row_E, order.count_E, order.by_size_E, num_experts, M=height, N=width, BM=bm, BN=bn, BK=_DEPTH,
        NUM_PROGRAMS=programs, ADD=add,
        BY_COPY=out.dtype == torch.float32 and out.is_cuda,  # Triton's interpreter has no such copy
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
