"""Attention over a part of the keys, and how results for several parts become one.

With the log-sum-exp of its scores beside it, an attention output can be merged with that for other keys (arXiv
2112.05682), and the gradients of each part follow from the merged output and log-sum-exp alone. No autograd here: the
callers (ring attention) run the backward themselves.

In half precision on CUDA and on the CPU these are torch's flash attention kernels; elsewhere matrix products with fp32
scores, a bounded number of them at a time.

Shapes: B sequences, H heads (the same number for queries, keys and values), Q queries, K keys, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_SCORES = 2**26  # held at once by the path without a kernel


def attend_part(q_BHQd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, d] in q's dtype and log-sum-exp of the scores, fp32 [B, H, Q]. ``causal``: Q = K."""
    q, k, v = q_BHQd.contiguous(), k_BHKd.contiguous(), v_BHKd.contiguous()
    if _has_cuda_kernel(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if _has_cpu_kernel(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return _attend_plain(q, k, v, causal)


def attend_part_backward(
    grad_BHQd: Tensor,
    q_BHQd: Tensor,
    k_BHKd: Tensor,
    v_BHKd: Tensor,
    out_BHQd: Tensor,
    lse_BHQ: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's gradients of q, k and v; ``out`` and ``lse`` are those over all keys."""
    args = tuple(x.contiguous() for x in (grad_BHQd, q_BHQd, k_BHKd, v_BHKd, out_BHQd, lse_BHQ))
    if _has_cuda_kernel(q_BHQd):
        num_queries, num_keys = q_BHQd.shape[2], k_BHKd.shape[2]
        no_seed = torch.zeros(2, dtype=torch.uint64, device=q_BHQd.device)  # dropout is off
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *args, None, None, num_queries, num_keys, 0.0, causal, no_seed, no_seed
        )
    if _has_cpu_kernel(q_BHQd):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, causal)
    return _attend_plain_backward(args, causal)


def merge(out_BHQd: Tensor, lse_BHQ: Tensor, more_BHQd: Tensor, more_lse_BHQ: Tensor) -> None:
    """Adds the result for further keys to ``out`` (fp32) and ``lse``, in place."""
    total_BHQ = torch.logaddexp(lse_BHQ, more_lse_BHQ)
    out_BHQd.mul_((lse_BHQ - total_BHQ).exp_()[..., None])
    out_BHQd.add_(more_BHQd * (more_lse_BHQ - total_BHQ).exp_()[..., None])
    lse_BHQ.copy_(total_BHQ)


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _has_cuda_kernel(q: Tensor) -> bool:
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and is_half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _scores(q: Tensor, k: Tensor, first_query: int, causal: bool) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        queries = torch.arange(first_query, first_query + q.shape[2], device=q.device)
        keys = torch.arange(k.shape[2], device=q.device)
        scores.masked_fill_(keys > queries[:, None], -math.inf)
    return scores


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for first, piece in _pieces(q, k):
        scores = _scores(piece, k, first, causal)
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(((scores - lse[..., None]).exp_() @ v.float()).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_plain_backward(args: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = args
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for first, piece in _pieces(q, k):
        rows = slice(first, first + piece.shape[2])
        grad_rows = grad[:, :, rows].float()
        weights = (_scores(piece, k, first, causal) - lse[:, :, rows, None]).exp_()
        dv += weights.transpose(-1, -2) @ grad_rows
        dot = (grad_rows * out[:, :, rows].float()).sum(dim=-1, keepdim=True)
        dscores = weights * (grad_rows @ v.float().transpose(-1, -2) - dot) / math.sqrt(q.shape[-1])
        dq[:, :, rows] = (dscores @ k.float()).to(q.dtype)
        dk += dscores.transpose(-1, -2) @ piece.float()
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _pieces(q: Tensor, k: Tensor) -> list[tuple[int, Tensor]]:
    """(first query, queries) of pieces whose scores stay within MAX_SCORES."""
    size = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [(first, q[:, :, first : first + size]) for first in range(0, q.shape[2], size)]
