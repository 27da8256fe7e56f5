"""Ring attention: queries stay on their rank, keys and values travel round the ring of ranks.

A sequence is cut into 2c pieces; rank r has pieces r and 2c-1-r, in this order. In step t it has the keys and values
of rank r-t, sends them to the next rank while it attends to them, and merges the result (layers/partial_attention.py).
Of the four pairs of pieces of a step, two are needed (at step 0 one and two halves) on every rank: the work is
balanced, and nothing that the causal mask would remove is computed. Where documents share a sequence, two different
pieces have at most one document in common, the one that reaches from the former into the latter.

In the backward keys and values travel round once more, and their gradients follow one step behind, in fp32.

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
from megatron.optimus.platform.collectives import AsyncCollective, compute_once, start_ring_shift


class Span(NamedTuple):
    """A range of a rank's queries and the range of another rank's keys that all of them see."""

    rows: slice  # sequences
    queries: slice
    keys: slice
    causal: bool  # the same positions on both sides


class RingAttention:
    """Ring attention over the ranks of the group as an attention's ``core_attention``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, documents: Documents | None) -> Tensor:
        cu_seqlens_host = None if documents is None else documents.cu_seqlens_host
        kv_2BGSd = torch.stack((k_BGSd, v_BGSd)).contiguous()
        return _Ring.apply(q_BHSd.contiguous(), kv_2BGSd, self.group, cu_seqlens_host)


def spans(
    rank: int, source: int, size: int, length: int, batch: int, cu_seqlens_host: tuple[int, ...] | None
) -> list[Span]:
    """Which keys of one rank the queries of another see.

    Args:
        rank: whose queries.
        source: whose keys.
        size: ranks of the ring.
        length: positions of each rank.
        batch: sequences.
        cu_seqlens_host: boundaries of documents over the tokens of the whole sequences (layers/documents.py); None:
            each sequence is one document.

    Returns:
        The spans, causal ones first: for rank = source they contain each position once.
    """
    half = length // 2
    own = ((rank, 0), (2 * size - 1 - rank, half))
    theirs = ((source, 0), (2 * size - 1 - source, half))
    if cu_seqlens_host is None:
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
                    inner = [b for b in cu_seqlens_host if first < b < last]
                    for low, high in zip([first, *inner], [*inner, last], strict=True):
                        here = slice(low - first + query_offset, high - first + query_offset)
                        found.append(Span(slice(row, row + 1), here, here, causal=True))
                    continue
                number = bisect_right(cu_seqlens_host, last - 1)  # the document of the last key ends there
                query_first = start + query_piece * half
                num_queries = min(cu_seqlens_host[number] - query_first, half)
                if num_queries <= 0:
                    continue
                key_low = max(cu_seqlens_host[number - 1] - first, 0)
                queries = slice(query_offset, query_offset + num_queries)
                keys = slice(key_offset + key_low, key_offset + half)
                found.append(Span(slice(row, row + 1), queries, keys, causal=False))
    return sorted(found, key=lambda span: not span.causal)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSd: Tensor, kv_2BGSd: Tensor, group: dist.ProcessGroup, cu_seqlens_host: tuple[int, ...] | None
    ) -> Tensor:
        ctx.group, ctx.cu_seqlens_host = group, cu_seqlens_host
        lse_BHS = torch.empty(q_BHSd.shape[:3], dtype=torch.float32, device=q_BHSd.device)
        out_BHSd = compute_once(_forward, q_BHSd, kv_2BGSd, lse_BHS, group, cu_seqlens_host)
        lse_BHS = compute_once(lambda: lse_BHS)
        ctx.save_for_backward(q_BHSd, kv_2BGSd, out_BHSd, lse_BHS)
        return out_BHSd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q_BHSd, kv_2BGSd, out_BHSd, lse_BHS = ctx.saved_tensors
        grad_BHSd, out_BHSd = grads[0].contiguous(), out_BHSd.contiguous()  # once for all steps
        dq, dkv = _backward(grad_BHSd, q_BHSd, kv_2BGSd, out_BHSd, lse_BHS, ctx.group, ctx.cu_seqlens_host)
        return dq, dkv, None, None


def _forward(
    q_BHSd: Tensor, kv_2BGSd: Tensor, lse_BHS: Tensor, group: dist.ProcessGroup, cu_seqlens_host: tuple[int, ...] | None
) -> Tensor:
    """Returns the output [B, H, S, d]; writes the log-sum-exp of the scores into ``lse_BHS``."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch, _, length, _ = q_BHSd.shape
    varying = cu_seqlens_host is not None
    out_BSHd = torch.empty_like(q_BHSd.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format)
    out_BHSd = out_BSHd.transpose(1, 2)  # heads of a position are contiguous, for the projection
    for step in range(size):
        arriving = _send_to_next(kv_2BGSd, group) if step < size - 1 else None
        for rows, queries, keys, causal in spans(rank, (rank - step) % size, size, length, batch, cu_seqlens_host):
            here, there = (rows, slice(None), queries), (slice(None), rows, slice(None), keys)
            k, v = kv_2BGSd[there]
            part, part_lse = attend_part(q_BHSd[here], k, v, causal, varying)
            if causal:  # the first span of its queries
                out_BHSd[here], lse_BHS[here] = part, part_lse
            else:
                merge(out_BHSd[here], lse_BHS[here], part, part_lse)
            del part
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
    cu_seqlens_host: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch, _, length, _ = q_BHSd.shape
    varying = cu_seqlens_host is not None
    dq_BHSd = torch.empty_like(q_BHSd, dtype=torch.float32)
    dkv_2BGSd = torch.empty_like(kv_2BGSd, dtype=torch.float32)
    following: AsyncCollective | None = None  # gradients of these keys and values from the ranks they have visited
    for step in range(size):
        arriving = _send_to_next(kv_2BGSd, group) if step < size - 1 else None
        parts = []
        for rows, queries, keys, causal in spans(rank, (rank - step) % size, size, length, batch, cu_seqlens_host):
            here, there = (rows, slice(None), queries), (slice(None), rows, slice(None), keys)
            k, v = kv_2BGSd[there]
            args = (grad_BHSd[here], q_BHSd[here], k, v, out_BHSd[here], lse_BHS[here])
            parts.append((here, there, causal, attend_part_backward(*args, causal, varying)))
        if following is not None:  # not before the kernels above, which need not wait for it
            dkv_2BGSd = following.wait()
        while parts:  # none of them stays in memory beside the kernels of the next step
            _add(dq_BHSd, dkv_2BGSd, *parts.pop(0))
        # The last send is to the owner, which converts them to this dtype anyway.
        following = _send_to_next(dkv_2BGSd if step < size - 1 else dkv_2BGSd.to(kv_2BGSd.dtype), group)
        if arriving is not None:
            kv_2BGSd = arriving.wait()
    assert following is not None
    return dq_BHSd.to(q_BHSd.dtype), following.wait()


def _add(
    dq_BHSd: Tensor,
    dkv_2BGSd: Tensor,
    here: tuple[Any, ...],
    there: tuple[Any, ...],
    causal: bool,
    part: tuple[Tensor, ...],
) -> None:
    """Adds a span's gradients to the sums in fp32; a causal span is the first and overwrites."""
    for total, more in zip((dq_BHSd[here], *dkv_2BGSd[there]), part, strict=True):
        if causal:
            total.copy_(more)
        else:
            total.add_(more)


def _send_to_next(x: Tensor, group: dist.ProcessGroup) -> AsyncCollective:
    return start_ring_shift(x, torch.empty_like(x), 1, group)
