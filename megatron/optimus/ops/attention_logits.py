"""The largest attention logit of each head, which the kernels of attention do not give (training/qk_clip.py).

On GPUs one Triton kernel multiplies queries and keys of 16 bits again and keeps the maximum alone. Elsewhere it is
plain PyTorch, a bounded number of scores at a time, in the dtype of the queries.

Shapes: B sequences, Q queries, K keys, H query heads, G key heads, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.optimus.ops.elementwise import check_device, runs_triton

MAX_SCORES = 2**24  # held at once


def largest_logits(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    positions_Q: Tensor,
    positions_K: Tensor,
    documents_BQ: Tensor | None = None,
    documents_BK: Tensor | None = None,
) -> Tensor:
    """Computes the largest logit of each query head over the keys that its queries see.

    Args:
        q_BHQd: queries, after RoPE; floating.
        k_BGKd: keys of the same dtype; each of the G heads serves H / G query heads.
        positions_Q: int64 positions of the queries; each sees the keys up to its own.
        positions_K: those of the keys; the same object where keys are those of the queries, in order.
        documents_BQ: numbers of the documents, int; where given, a query sees its own document only.
        documents_BK: those of the keys.

    Returns:
        fp32 [H], -inf without queries.

    Raises:
        ValueError: queries and keys do not fit together.
    """
    batch, heads, _, width = q_BHQd.shape
    if k_BGKd.shape[0] != batch or k_BGKd.shape[3] != width or heads % k_BGKd.shape[1] or q_BHQd.dtype != k_BGKd.dtype:
        given = [f"{t.dtype} {tuple(t.shape)}" for t in (q_BHQd, k_BGKd)]
        raise ValueError(f"largest_logits: queries {given[0]} and keys {given[1]}; expected [B, H, Q, d], [B, G, K, d]")
    check_device("largest_logits", q_BHQd, k_BGKd, positions_Q, positions_K)
    if q_BHQd.dtype in (torch.bfloat16, torch.float16) and runs_triton(q_BHQd):
        from megatron.optimus.ops.triton import attention_logits as kernels

        largest_H = kernels.largest_scores(q_BHQd, k_BGKd, positions_Q, positions_K, documents_BQ, documents_BK)
    else:
        largest_H = _largest_scores(q_BHQd, k_BGKd, positions_Q, positions_K, documents_BQ, documents_BK)
    return largest_H / math.sqrt(width)


def _largest_scores(
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    positions_Q: Tensor,
    positions_K: Tensor,
    documents_BQ: Tensor | None,
    documents_BK: Tensor | None,
) -> Tensor:
    """The largest products, fp32 [H], in plain PyTorch."""
    batch, heads, queries, _ = q_BHQd.shape
    groups, keys = k_BGKd.shape[1:3]
    rows = max(1, MAX_SCORES // max(1, batch * heads * keys))
    largest_H = torch.full((heads,), -math.inf, device=q_BHQd.device)
    for start in range(0, queries, rows):
        part = slice(start, start + rows)
        seen_keys = slice(0, start + rows if positions_K is positions_Q else keys)
        q = q_BHQd[:, :, part].unflatten(1, (groups, -1)).flatten(2, 3)
        scores_BHqK = (q @ k_BGKd[:, :, seen_keys].mT).view(batch, heads, -1, k_BGKd[:, :, seen_keys].shape[2])
        hidden = positions_K[seen_keys] > positions_Q[part, None]
        if documents_BQ is not None and documents_BK is not None:
            hidden = hidden | (documents_BK[:, None, seen_keys] != documents_BQ[:, part, None])
            hidden = hidden[:, None]
        scores_BHqK.masked_fill_(hidden, -math.inf)
        largest_H = torch.maximum(largest_H, scores_BHqK.amax(dim=(0, 2, 3)))
    return largest_H
