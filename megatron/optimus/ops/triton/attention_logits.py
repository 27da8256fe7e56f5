# mypy: disable-error-code=no-untyped-def
"""The largest product of a query and a key that it sees, for each head: attention's first product without the rest.

Shapes: B sequences, Q queries, K keys, H query heads, G key heads, d head width, P programs of a head's queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # of a program's tile
_WIDE = 128  # heads above it take 128 queries a tile, others 64: as fast as a forward on an H200, widths 64 to 192


@triton.jit
def _largest_scores(
    q_ptr, k_ptr, q_position_ptr, k_position_ptr, q_document_ptr, k_document_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_g, k_stride_s, num_queries, num_keys, heads, shared, width,
    IN_ORDER: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """IN_ORDER: no query of a tile sees a key behind the tile. ``shared`` query heads have one key head."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    col = tl.arange(0, WIDTH)
    there = query < num_queries
    rows = q_ptr + sequence * q_stride_b + head * q_stride_h + query[:, None].to(tl.int64) * q_stride_s
    q = tl.load(rows + col[None, :], mask=there[:, None] & (col < width)[None, :], other=0.0)
    position = tl.load(q_position_ptr + query, mask=there, other=-1)  # sees nothing
    if HAS_DOCUMENTS:
        document = tl.load(q_document_ptr + sequence * num_queries + query, mask=there, other=-1)
    columns = k_ptr + sequence * k_stride_b + (head // shared) * k_stride_g
    largest = tl.full([QUERIES, KEYS], -float("inf"), tl.float32)
    stop = tl.minimum((tl.program_id(0) + 1) * QUERIES, num_keys) if IN_ORDER else num_keys
    for start in range(0, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < num_keys
        place = columns + key[None, :].to(tl.int64) * k_stride_s + col[:, None]
        k = tl.load(place, mask=inside[None, :] & (col < width)[:, None], other=0.0)
        scores = tl.dot(q, k)
        seen = inside[None, :] & (tl.load(k_position_ptr + key, mask=inside, other=0)[None, :] <= position[:, None])
        if HAS_DOCUMENTS:
            own = tl.load(k_document_ptr + sequence * num_keys + key, mask=inside, other=-2)
            seen = seen & (own[None, :] == document[:, None])
        largest = tl.maximum(largest, tl.where(seen, scores, -float("inf")))
    tl.store(out_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


def largest_scores(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    positions_Q: Tensor,
    positions_K: Tensor,
    documents_BQ: Tensor | None,
    documents_BK: Tensor | None,
) -> Tensor:
    """See ``ops.largest_logits``; without its scale, fp32 [H]. A product that is NaN counts as none."""
    q_BHQd, k_BGKd = (t if t.stride(3) == 1 else t.contiguous() for t in (q_BHQd, k_BGKd))
    batch, heads, queries, width = q_BHQd.shape
    groups, keys = k_BGKd.shape[1:3]
    documents = [positions_Q, positions_K]  # not read
    if documents_BQ is not None and documents_BK is not None:
        documents = [documents_BQ.contiguous(), documents_BK.contiguous()]
    tile = 128 if width > _WIDE else 64
    out_BHP = q_BHQd.new_empty(batch, heads, triton.cdiv(queries, tile), dtype=torch.float32)
    _largest_scores[(out_BHP.shape[2], batch * heads)](
        q_BHQd, k_BGKd, positions_Q, positions_K, *documents, out_BHP, *q_BHQd.stride()[:3], *k_BGKd.stride()[:3],
        queries, keys, heads, heads // groups, width, IN_ORDER=positions_K is positions_Q,
        HAS_DOCUMENTS=documents_BQ is not None, WIDTH=max(16, triton.next_power_of_2(width)), QUERIES=tile,
        KEYS=_KEYS, num_warps=4,
    )  # fmt: skip
    return out_BHP.amax((0, 2))
