# mypy: disable-error-code=no-untyped-def
"""From expert choices to row order on the device: no host synchronisation, no atomics on global memory, stable.

Rows are slots in expert order. The rows of each expert start at a multiple of ROW_TILE, so that a tile of rows belongs
to one expert and copies by the tensor memory engine need no masks; the rows added by this are marked -1. What is kept
for the backward leaves them out: row p is row p - tile_shift[p // ROW_TILE] there.
Legend: N = T*K slots, P <= N + E*ROW_TILE rows with that padding, B blocks of slots, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.tiles import ROW_TILE

_BLOCK = 256
_STEP = 128
_TILES = 16  # of a program


class PaddedRowOrder(NamedTuple):
    """Where each slot's row is; every tensor is int32 on the device."""

    slot_P: Tensor  # slot of each row, -1 for padding
    row_N: Tensor  # row of each slot, -1 for a foreign slot
    first_row_E: Tensor  # multiple of ROW_TILE
    count_E: Tensor  # slots of each expert
    tile_expert: Tensor  # [P / ROW_TILE] expert of each tile of rows, -1 after the last used tile
    num_tiles: Tensor  # [1] tiles of rows in use
    by_size_E: Tensor  # experts, the one with most slots first; of equals the one with the lower number
    tile_shift: Tensor  # [P / ROW_TILE] rows of no slot before each tile


@triton.jit
def _expert_of(index, num_experts):
    """-1 for a slot of no expert here. Compared before it is narrowed: 2**32 is not expert 0."""
    return tl.where((index >= 0) & (index < num_experts), index, -1).to(tl.int32)


@triton.jit(debug=True)  # keeps the assertion in: an index out of range stops the device as torch's own kernels do
def _count(indices_ptr, block_counts_ptr, num_slots, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + slot, mask=slot < num_slots, other=-1)
    tl.device_assert((index >= -1) & (index < num_experts), "an expert index is outside [-1, E)")
    expert = _expert_of(index, num_experts)
    counts = tl.histogram(tl.where(expert < 0, EXPERTS - 1, expert), EXPERTS)
    tl.store(block_counts_ptr + block * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def _scan(block_counts_ptr, count_ptr, num_blocks, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """One program per expert: counts of blocks become counts of all blocks before."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        counts = tl.load(block_counts_ptr + block * EXPERTS + expert, mask=block < num_blocks, other=0)
        before = tl.cumsum(counts, 0) - counts + total
        tl.store(block_counts_ptr + block * EXPERTS + expert, before, mask=block < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(count_ptr + expert, total)


@triton.jit
def _tiles(
    count_ptr, first_row_ptr, tile_expert_ptr, num_tiles_ptr, by_size_ptr, tile_shift_ptr, num_experts, max_tiles,
    EXPERTS: tl.constexpr, OTHERS: tl.constexpr, ROW_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + expert, mask=expert < num_experts, other=0)
    tiles = (counts + ROW_TILE - 1) // ROW_TILE
    ends = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(first_row_ptr + expert, (ends - tiles) * ROW_TILE, mask=expert < num_experts)
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
        rank = tl.zeros([EXPERTS], dtype=tl.int32)
        for start in range(0, EXPERTS, OTHERS):
            other = start + tl.arange(0, OTHERS)[None, :]
            more = tl.load(count_ptr + other, mask=other < num_experts, other=-1)
            before = (more > counts[:, None]) | ((more == counts[:, None]) & (other < expert[:, None]))
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(by_size_ptr + rank, expert, mask=expert < num_experts)
    tile = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_after = ends[None, :] <= tile[:, None]
    owner = tl.sum(is_after.to(tl.int32), 1)
    shift = tl.sum(tl.where(is_after, (tiles * ROW_TILE - counts)[None, :], 0), 1)
    tl.store(tile_shift_ptr + tile, shift, mask=tile < max_tiles)
    tl.store(tile_expert_ptr + tile, tl.where(tile < tl.sum(tiles, 0), owner, -1), mask=tile < max_tiles)


@triton.jit
def _place(
    indices_ptr, block_counts_ptr, first_row_ptr, slot_ptr, row_ptr, num_slots, num_experts,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    local = column < num_experts
    next_row = tl.load(block_counts_ptr + block * EXPERTS + column) + tl.load(
        first_row_ptr + column, mask=local, other=0
    )
    for step in range(0, BLOCK, STEP):
        slot = block * BLOCK + step + tl.arange(0, STEP)
        expert = _expert_of(tl.load(indices_ptr + slot, mask=slot < num_slots, other=-1), num_experts)
        is_local = expert >= 0
        chosen = ((expert[:, None] == column[None, :]) & local[None, :]).to(tl.int32)
        row = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + next_row[None, :]), 1)
        tl.store(slot_ptr + row, slot, mask=is_local)
        tl.store(row_ptr + slot, tl.where(is_local, row, -1), mask=slot < num_slots)
        next_row += tl.sum(chosen, 0)


def row_order_sizes(num_slots: int, num_experts: int) -> tuple[int, ...]:
    """Elements of each tensor of a PaddedRowOrder, for those who make one without data."""
    num_rows = max_rows(num_slots, num_experts)
    max_tiles = num_rows // ROW_TILE
    return num_rows, num_slots, num_experts, num_experts, max_tiles, 1, num_experts, max_tiles


def max_rows(num_slots: int, num_experts: int) -> int:
    """Rows that suffice for any routing: a multiple of ROW_TILE."""
    return (num_slots // ROW_TILE + min(num_experts, num_slots)) * ROW_TILE + ROW_TILE


def order_rows(indices_TK: Tensor, num_experts: int) -> PaddedRowOrder:
    """Stable order of rows by expert. Slots outside [0, E) are foreign: they get no row."""
    indices = indices_TK.contiguous()
    num_slots, device = indices.numel(), indices.device
    num_blocks = triton.cdiv(num_slots, _BLOCK)
    columns = triton.next_power_of_2(num_experts + 1)
    num_rows = max_rows(num_slots, num_experts)
    max_tiles = num_rows // ROW_TILE

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    block_counts = ints(num_blocks, columns)
    order = PaddedRowOrder(
        slot_P=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        row_N=ints(num_slots),
        first_row_E=ints(num_experts),
        count_E=ints(num_experts),
        tile_expert=ints(max_tiles),
        num_tiles=ints(1),
        by_size_E=ints(num_experts),
        tile_shift=ints(max_tiles),
    )
    _count[(num_blocks,)](indices, block_counts, num_slots, num_experts, BLOCK=_BLOCK, EXPERTS=columns)
    _scan[(num_experts,)](block_counts, order.count_E, num_blocks, EXPERTS=columns, CHUNK=1024)
    _tiles[(triton.cdiv(max_tiles, _TILES),)](
        order.count_E, order.first_row_E, order.tile_expert, order.num_tiles, order.by_size_E, order.tile_shift,
        num_experts, max_tiles, EXPERTS=columns, OTHERS=min(columns, 32), ROW_TILE=ROW_TILE, CHUNK=_TILES,
    )  # fmt: skip
    _place[(num_blocks,)](
        indices, block_counts, order.first_row_E, order.slot_P, order.row_N, num_slots, num_experts,
        BLOCK=_BLOCK, STEP=_STEP, EXPERTS=columns,
    )  # fmt: skip
    return order
