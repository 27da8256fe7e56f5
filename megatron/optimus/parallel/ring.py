"""Ring attention: queries stay on their rank, keys and values go round the ring of ranks.

A sequence is cut into 2c pieces; rank r has pieces r and 2c-1-r, in this order. In step t it has the keys and values
of rank r-t, sends them on while it works, and merges what its queries find among them (layers/partial_attention.py).
Of the four pairs of pieces that meet in a step, two are wanted (at step 0 one and two halves), whatever the rank: the
work is balanced, and nothing that the causal mask would remove is computed. Where documents share a sequence, two
different pieces have in common at most the one document that reaches from the former into the latter.

In the backward keys and values go round once more, and their gradients follow them one step behind, in fp32.

Shapes: B sequences, S positions of a rank, H query heads, G key/value heads, d head width, c ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.layers.documents import Documents
from megatron.optimus.layers.partial_attention import attend_part, attend_part_backward, merge
from megatron.optimus.parallel.collectives import Started, once, start_exchange


class Span(NamedTuple):
    """Queries and keys, as ranges of the positions of two ranks, that see each other."""

    rows: slice  # sequences
    queries: slice
    keys: slice
    causal: bool  # the same positions on both sides


class RingAttention:
    """Causal attention of this rank's positions over those of all ranks of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        bounds = None if documents is None else documents.bounds
        return _Ring.apply(q_BHSd, torch.stack((k_BGSd, v_BGSd)), self.group, bounds)


def spans(rank: int, source: int, size: int, length: int, batch: int, bounds: tuple[int, ...] | None) -> list[Span]:
    """What the queries of ``rank`` see of the keys of ``source``; ``length`` positions on each of ``size`` ranks.

    ``bounds``: of documents, over the tokens of ``batch`` whole sequences (layers/documents.py).
    """
    half = length // 2
    own = ((rank, 0), (2 * size - 1 - rank, half))
    theirs = ((source, 0), (2 * size - 1 - source, half))
    if bounds is None:
        everything = slice(0, batch)
        if rank == source:
            return [Span(everything, slice(0, length), slice(0, length), causal=True)]
        if source < rank:
            return [Span(everything, slice(0, length), slice(0, half), causal=False)]
        return [Span(everything, slice(half, length), slice(0, length), causal=False)]
    found = []
    for row in range(batch):
        start = row * length * size
        for query_piece, query_offset in own:
            for key_piece, key_offset in theirs:
                if key_piece > query_piece:
                    continue
                first = start + key_piece * half  # of the keys, then one past their last
                last = first + half
                if key_piece == query_piece:
                    inner = [b for b in bounds if first < b < last]
                    for low, high in zip([first, *inner], [*inner, last], strict=True):
                        here = slice(low - first + query_offset, high - first + query_offset)
                        found.append(Span(slice(row, row + 1), here, here, causal=True))
                    continue
                number = bisect_right(bounds, last - 1)  # the document of the last key ends at bounds[number]
                query_first = start + query_piece * half
                num_queries = min(bounds[number] - query_first, half)
                if num_queries <= 0:
                    continue
                key_low = max(bounds[number - 1] - first, 0)
                queries = slice(query_offset, query_offset + num_queries)
                keys = slice(key_offset + key_low, key_offset + half)
                found.append(Span(slice(row, row + 1), queries, keys, causal=False))
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSd: Tensor, kv_2BGSd: Tensor, group: dist.ProcessGroup, bounds: tuple[int, ...] | None
    ) -> Tensor:
        ctx.group, ctx.bounds = group, bounds
        lse_BHS = torch.empty(q_BHSd.shape[:3], dtype=torch.float32, device=q_BHSd.device)
        out_BHSd = once(_forward, q_BHSd, kv_2BGSd, lse_BHS, group, bounds)
        lse_BHS = once(lambda: lse_BHS)
        ctx.save_for_backward(q_BHSd, kv_2BGSd, out_BHSd, lse_BHS)
        return out_BHSd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q_BHSd, kv_2BGSd, out_BHSd, lse_BHS = ctx.saved_tensors
        dq, dkv = _backward(grads[0], q_BHSd, kv_2BGSd, out_BHSd, lse_BHS, ctx.group, ctx.bounds)
        return dq, dkv, None, None


def _forward(
    q_BHSd: Tensor, kv_2BGSd: Tensor, lse_BHS: Tensor, group: dist.ProcessGroup, bounds: tuple[int, ...] | None
) -> Tensor:
    """The output; fills the log-sum-exp of the scores."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch, heads, length, _ = q_BHSd.shape
    out_BHSd = torch.zeros_like(q_BHSd, dtype=torch.float32)
    lse_BHS.fill_(-torch.inf)
    kv_2BGSd = kv_2BGSd.contiguous()
    for step in range(size):
        arriving = _pass_on(kv_2BGSd, group) if step < size - 1 else None
        k_BHSd, v_BHSd = _for_heads(kv_2BGSd, heads)
        for rows, queries, keys, causal in spans(rank, (rank - step) % size, size, length, batch, bounds):
            part, part_lse = attend_part(q_BHSd[rows, :, queries], k_BHSd[rows, :, keys], v_BHSd[rows, :, keys], causal)
            merge(out_BHSd[rows, :, queries], lse_BHS[rows, :, queries], part, part_lse)
        if arriving is not None:
            kv_2BGSd = arriving.wait()
    return out_BHSd.to(q_BHSd.dtype)


def _backward(
    grad_BHSd: Tensor,
    q_BHSd: Tensor,
    kv_2BGSd: Tensor,
    out_BHSd: Tensor,
    lse_BHS: Tensor,
    group: dist.ProcessGroup,
    bounds: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch, heads, length, _ = q_BHSd.shape
    dq_BHSd = torch.zeros_like(q_BHSd, dtype=torch.float32)
    dtype, kv_2BGSd = kv_2BGSd.dtype, kv_2BGSd.contiguous()
    following: Started | None = None  # gradients of the keys and values at hand, from the ranks they have visited
    for step in range(size):
        arriving = _pass_on(kv_2BGSd, group) if step < size - 1 else None
        k_BHSd, v_BHSd = _for_heads(kv_2BGSd, heads)
        dkv_2BHSd = torch.zeros(2, *k_BHSd.shape, dtype=torch.float32, device=k_BHSd.device)
        for rows, queries, keys, causal in spans(rank, (rank - step) % size, size, length, batch, bounds):
            here, there = (rows, slice(None), queries), (rows, slice(None), keys)
            dq, dk, dv = attend_part_backward(
                grad_BHSd[here],
                q_BHSd[here],
                k_BHSd[there],
                v_BHSd[there],
                out_BHSd[here],
                lse_BHS[here],
                causal,
            )
            dq_BHSd[here] += dq
            dkv_2BHSd[0][there] += dk
            dkv_2BHSd[1][there] += dv
        dkv_2BGSd = dkv_2BHSd.unflatten(2, (kv_2BGSd.shape[2], -1)).sum(dim=3)
        if following is not None:
            dkv_2BGSd += following.wait()
        following = _pass_on(dkv_2BGSd, group)
        if arriving is not None:
            kv_2BGSd = arriving.wait()
    assert following is not None
    return dq_BHSd.to(q_BHSd.dtype), following.wait().to(dtype)


def _for_heads(kv_2BGSd: Tensor, heads: int) -> Tensor:
    """[2, B, H, S, d]: key/value heads repeated for the query heads that share them."""
    return kv_2BGSd.repeat_interleave(heads // kv_2BGSd.shape[2], dim=2)


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> Started:
    return start_exchange(x, torch.empty_like(x), 1, group)
