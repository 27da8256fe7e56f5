# mypy: disable-error-code=no-untyped-def
"""Kernels of the symmetric-memory token dispatcher: they read and write the memory of other GPUs of the node.

A peer's memory is given by its address: ``..._at_P``, int64 [P] on the device, one for each rank of the group in order,
this rank's own among them. Nothing here waits for another rank: the barriers are in moe/dispatch/symmetric.py.

Every kernel goes over peers fastest and begins at its own rank: at any time each rank talks with all others, and no
rank is asked by all of them at once.

Shapes: T tokens of each rank, P ranks, R = P T rows (row p T + t is token t of rank p), D width, K choices per token,
E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.permute import _block

_TILE = 8192  # elements that a program moves at once: enough bytes under way to cover a link's latency
_CHOICE_ROWS = 128


@triton.jit
def _memory_of(addresses_ptr, peer, like_ptr):
    """Where a peer's memory begins, as a pointer to elements of the type of ``like_ptr``."""
    start = tl.load(addresses_ptr + peer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return tl.multiple_of(start, 16)  # else elements are loaded one by one: the compiler knows nothing of an address


@triton.jit
def _choices(
    indices_at_ptr, weights_at_ptr, owner_ptr, local_ptr, indices_ptr, weights_ptr, needed_ptr, rank, num_tokens,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    peer = (rank + tl.program_id(0)) % NUM_RANKS
    token = tl.program_id(0) // NUM_RANKS * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)[None, :]
    inside = (token < num_tokens)[:, None] & (k < TOPK)
    there = token[:, None] * TOPK + k
    here = (peer * num_tokens + token).to(tl.int64)[:, None] * TOPK + k
    expert = tl.load(_memory_of(indices_at_ptr, peer, indices_ptr) + there, mask=inside, other=0)
    weight = tl.load(_memory_of(weights_at_ptr, peer, weights_ptr) + there, mask=inside)
    is_mine = inside & (tl.load(owner_ptr + expert) == rank)
    local = tl.load(local_ptr + expert).to(tl.int32)
    tl.store(indices_ptr + here, tl.where(is_mine, local, -1), mask=inside)
    tl.store(weights_ptr + here, weight, mask=inside)
    needed = tl.max(is_mine.to(tl.int8), 1)
    tl.store(needed_ptr + peer * num_tokens + token, needed, mask=token < num_tokens)


def read_choices(
    indices_at_P: Tensor, weights_at_P: Tensor, owner_E: Tensor, local_E: Tensor, rank: int, num_tokens: int, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' choices, from their int32 and fp32 [T, K]: the expert's number on this rank or -1, int32 [R, K]; the
    weights, fp32 [R, K]; and whether a row has a choice here, int8 [R]."""
    num_ranks, device = indices_at_P.shape[0], indices_at_P.device
    num_rows = num_ranks * num_tokens
    indices_RK = torch.empty(num_rows, topk, dtype=torch.int32, device=device)
    weights_RK = torch.empty(num_rows, topk, dtype=torch.float32, device=device)
    needed_R = torch.empty(num_rows, dtype=torch.int8, device=device)
    _choices[(triton.cdiv(num_tokens, _CHOICE_ROWS) * num_ranks,)](
        indices_at_P, weights_at_P, owner_E, local_E, indices_RK, weights_RK, needed_R, rank, num_tokens,
        NUM_RANKS=num_ranks, TOPK=topk, SLOTS=triton.next_power_of_2(topk), ROWS=_CHOICE_ROWS,
    )  # fmt: skip
    return indices_RK, weights_RK, needed_R


@triton.jit
def _pull(
    rows_at_ptr, needed_ptr, out_ptr, rank, num_tokens,
    NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    peer = (rank + tl.program_id(0)) % NUM_RANKS
    token = tl.program_id(0) // NUM_RANKS * ROWS + tl.arange(0, ROWS)
    row = peer * num_tokens + token
    needed = tl.load(needed_ptr + row, mask=token < num_tokens, other=0) != 0
    rows_ptr = _memory_of(rows_at_ptr, peer, out_ptr)
    for start in range(0, WIDTH, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = needed[:, None] & (col < WIDTH)
        values = tl.load(rows_ptr + token.to(tl.int64)[:, None] * WIDTH + col, mask=mask)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + col, values, mask=mask)


def pull_rows(rows_at_P: Tensor, needed_R: Tensor, rank: int, width: int, dtype: torch.dtype) -> Tensor:
    """[R, D] with the needed rows of all ranks' [T, D]; the others stay unwritten, whatever they hold."""
    num_ranks = rows_at_P.shape[0]
    num_tokens, block = needed_R.shape[0] // num_ranks, _block(width, 2048)
    out_RD = torch.empty(needed_R.shape[0], width, dtype=dtype, device=needed_R.device)
    rows = _TILE // block
    _pull[(triton.cdiv(num_tokens, rows) * num_ranks,)](
        rows_at_P, needed_R, out_RD, rank, num_tokens, NUM_RANKS=num_ranks, WIDTH=width, ROWS=rows, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return out_RD


@triton.jit
def _push(
    rows_ptr, needed_ptr, outputs_at_ptr, num_tokens,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    peer = (RANK + 1 + tl.program_id(0) % (NUM_RANKS - 1)) % NUM_RANKS  # any but this rank
    token = tl.program_id(0) // (NUM_RANKS - 1) * ROWS + tl.arange(0, ROWS)
    row = peer * num_tokens + token
    needed = tl.load(needed_ptr + row, mask=token < num_tokens, other=0) != 0
    slot = tl.where(peer < RANK, RANK - 1, RANK)
    place = (slot * num_tokens + token).to(tl.int64)
    outputs_ptr = _memory_of(outputs_at_ptr, peer, rows_ptr)
    for start in range(0, WIDTH, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        mask = needed[:, None] & (col < WIDTH)
        values = tl.load(rows_ptr + row.to(tl.int64)[:, None] * WIDTH + col, mask=mask)
        tl.store(outputs_ptr + place[:, None] * WIDTH + col, values, mask=mask)


def push_rows(rows_RD: Tensor, needed_R: Tensor, outputs_at_P: Tensor, rank: int) -> None:
    """Each needed row of another rank into that rank's ``outputs`` [P - 1, T, D], at this rank's place among the ranks
    without the owner."""
    num_ranks, width = outputs_at_P.shape[0], rows_RD.shape[1]
    num_tokens, block = needed_R.shape[0] // num_ranks, _block(width, 2048)
    rows = _TILE // block
    _push[(triton.cdiv(num_tokens, rows) * (num_ranks - 1),)](
        rows_RD, needed_R, outputs_at_P, num_tokens, RANK=rank, NUM_RANKS=num_ranks, WIDTH=width, ROWS=rows,
        BLOCK=block, num_warps=8,
    )  # fmt: skip


@triton.jit
def _push_gradients(
    dweights_ptr, indices_ptr, dweights_at_ptr, rank, num_tokens,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    peer = (rank + tl.program_id(0)) % NUM_RANKS
    token = tl.program_id(0) // NUM_RANKS * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)[None, :]
    inside = (token < num_tokens)[:, None] & (k < TOPK)
    here = (peer * num_tokens + token).to(tl.int64)[:, None] * TOPK + k
    is_mine = tl.load(indices_ptr + here, mask=inside, other=-1) >= 0
    dweight = tl.load(dweights_ptr + here, mask=is_mine)
    tl.store(_memory_of(dweights_at_ptr, peer, dweights_ptr) + token[:, None] * TOPK + k, dweight, mask=is_mine)


def push_weight_gradients(dweights_RK: Tensor, indices_RK: Tensor, dweights_at_P: Tensor, rank: int) -> None:
    """The gradient of the weight of each choice served here (index not -1) into [T, K] of the token's rank.

    Every choice is served by one rank, so the ranks together write each element once.
    """
    num_ranks, (num_rows, topk) = dweights_at_P.shape[0], indices_RK.shape
    num_tokens = num_rows // num_ranks
    _push_gradients[(triton.cdiv(num_tokens, _CHOICE_ROWS) * num_ranks,)](
        dweights_RK, indices_RK, dweights_at_P, rank, num_tokens, NUM_RANKS=num_ranks, TOPK=topk,
        SLOTS=triton.next_power_of_2(topk), ROWS=_CHOICE_ROWS,
    )  # fmt: skip


@triton.jit
def _sum_outputs(
    rows_ptr, outputs_ptr, indices_ptr, owner_ptr, out_ptr, num_tokens,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)[None, :]
    inside = (token < num_tokens)[:, None]
    chosen = inside & (k < TOPK)
    expert = tl.load(indices_ptr + token.to(tl.int64)[:, None] * TOPK + k, mask=chosen, other=0)
    owner = tl.where(chosen, tl.load(owner_ptr + expert).to(tl.int32), -1)
    for start in range(0, WIDTH, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for peer in tl.static_range(NUM_RANKS):  # always in this order
            needed = (tl.max((owner == peer).to(tl.int32), 1) > 0)[:, None]
            if peer == RANK:
                source = rows_ptr + (RANK * num_tokens + token).to(tl.int64)[:, None] * WIDTH
            elif peer > RANK:
                source = outputs_ptr + ((peer - 1) * num_tokens + token).to(tl.int64)[:, None] * WIDTH
            else:
                source = outputs_ptr + (peer * num_tokens + token).to(tl.int64)[:, None] * WIDTH
            total += tl.load(source + col, mask=needed & (col < WIDTH), other=0.0).to(tl.float32)
        place = out_ptr + token.to(tl.int64)[:, None] * WIDTH + col
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside & (col < WIDTH))


def sum_outputs(
    rows_RD: Tensor, outputs_PTD: Tensor, indices_TK: Tensor, owner_E: Tensor, rank: int, num_ranks: int
) -> Tensor:
    """[T, D]: for each own token the sum, in fp32 and in the order of the ranks, of what those that own one of its
    experts made of it: ``rows_RD`` for this rank, [P - 1, T, D] that ``push_rows`` filled for the others."""
    (num_tokens, topk), width = indices_TK.shape, rows_RD.shape[1]
    block = _block(width, 2048)
    rows = max(1, _TILE // 2 // block)
    out_TD = torch.empty(num_tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    _sum_outputs[(triton.cdiv(num_tokens, rows),)](
        rows_RD, outputs_PTD, indices_TK, owner_E, out_TD, num_tokens, RANK=rank, NUM_RANKS=num_ranks, TOPK=topk,
        SLOTS=triton.next_power_of_2(topk), WIDTH=width, ROWS=rows, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out_TD
