"""Attention over a part of the keys, and the merge of the results for several parts.

Given the log-sum-exp of its scores, an attention output can be merged with that for other keys (arXiv 2112.05682), and
the gradients of each part follow from the merged output and log-sum-exp alone. There is no autograd here: the caller
(ring attention) runs the backward itself.

``choose_kernel`` chooses the kernel. All kernels return the natural logarithm of the sum, so a forward by one and a
backward by another fit together.

Shapes: B sequences, H query heads, G key/value heads (G divides H), Q queries, K keys, d head width.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

MAX_SCORES = 2**26  # held at once where no fused kernel runs
HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


class Kernel(Enum):
    """What computes attention here; the value names it in messages."""

    CUDNN = "cuDNN's attention, as torch calls it"
    FLASH = "torch's FlashAttention-2 for CUDA"
    CPU = "torch's flash attention for the CPU"
    PLAIN = "matrix products with fp32 scores, a bounded number of them at a time"


def choose_kernel(q_BHQd: Tensor, k_BGKd: Tensor, v_BGKd: Tensor, causal: bool, varying: bool) -> Kernel:
    """The kernel for these inputs; on CUDA in half precision what torch prefers of cuDNN's and FlashAttention-2.

    Torch's rule knows the device, cuDNN's version and limits, and that cuDNN's backward is refused where algorithms
    must be deterministic.

    Args:
        q_BHQd: queries.
        k_BGKd: keys.
        v_BGKd: values.
        causal: as in ``attend_part``.
        varying: sizes differ from call to call. cuDNN compiles for each size, FlashAttention does not.
    """
    if q_BHQd.device.type == "cpu":
        return Kernel.CPU
    width = q_BHQd.shape[-1]
    if not q_BHQd.is_cuda or q_BHQd.dtype not in HALF or width % 8 or width > 256:
        return Kernel.PLAIN
    if varying:
        return Kernel.FLASH
    grouped = q_BHQd.shape[1] != k_BGKd.shape[1]
    preferred = torch._fused_sdp_choice(q_BHQd, k_BGKd, v_BGKd, None, 0.0, causal, enable_gqa=grouped)
    return Kernel.CUDNN if preferred == SDPBackend.CUDNN_ATTENTION.value else Kernel.FLASH


def attend_part(
    q_BHQd: Tensor, k_BGKd: Tensor, v_BGKd: Tensor, causal: bool, varying: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of the queries over these keys alone.

    Args:
        q_BHQd: queries.
        k_BGKd: keys.
        v_BGKd: values.
        causal: Q = K and each query sees the keys up to its own; otherwise every query sees every key.
        varying: see ``choose_kernel``.

    Returns:
        The output [B, H, Q, d] in q's dtype, and the log-sum-exp of the scores, fp32 [B, H, Q].
    """
    # Contiguous, because torch finds cuDNN's compiled plans by the strides of q, k and v alone, not of the others.
    q, k, v = q_BHQd.contiguous(), k_BGKd.contiguous(), v_BGKd.contiguous()
    kernel = choose_kernel(q, k, v, causal, varying)
    if kernel is Kernel.CUDNN:
        options = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": 0.0, "is_causal": causal}
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, **options)[:2]
        return out, lse.reshape(q.shape[:3])  # it comes as [B, H, Q, 1]
    if kernel is Kernel.FLASH:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p=0.0, is_causal=causal)[:2]
    k, v = _for_heads(k, q.shape[1]), _for_heads(v, q.shape[1])
    if kernel is Kernel.CPU:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p=0.0, is_causal=causal)
    return _attend_plain(q, k, v, causal)


def attend_part_backward(
    grad_BHQd: Tensor,
    q_BHQd: Tensor,
    k_BGKd: Tensor,
    v_BGKd: Tensor,
    out_BHQd: Tensor,
    lse_BHQ: Tensor,
    causal: bool,
    varying: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``attend_part`` as a part of the attention over all keys.

    Args:
        grad_BHQd: gradient of the merged output.
        q_BHQd: queries.
        k_BGKd: keys of the part.
        v_BGKd: values of the part.
        out_BHQd: output over all keys.
        lse_BHQ: log-sum-exp over all keys, fp32.
        causal: as in ``attend_part``.
        varying: as in ``attend_part``.

    Returns:
        This part's gradients of q, k and v, in their dtypes.
    """
    grad, q, k, v, out, lse = (x.contiguous() for x in (grad_BHQd, q_BHQd, k_BGKd, v_BGKd, out_BHQd, lse_BHQ))
    kernel = choose_kernel(q, k, v, causal, varying)
    if kernel in (Kernel.CUDNN, Kernel.FLASH):
        return _cuda_backward(kernel, grad, q, k, v, out, lse, causal)
    args = (grad, q, _for_heads(k, q.shape[1]), _for_heads(v, q.shape[1]), out, lse)
    if kernel is Kernel.CPU:
        options = {"dropout_p": 0.0, "is_causal": causal}
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, **options)
    else:
        dq, dk, dv = _attend_plain_backward(args, causal)
    return dq, _of_groups(dk, k.shape[1]), _of_groups(dv, k.shape[1])


def merge(out_BHQd: Tensor, lse_BHQ: Tensor, more_BHQd: Tensor, more_lse_BHQ: Tensor) -> None:
    """Merges the result for further keys into that for earlier ones, in place.

    Args:
        out_BHQd: output so far, fp32; changed.
        lse_BHQ: log-sum-exp so far, fp32 and finite; changed.
        more_BHQd: output for the further keys.
        more_lse_BHQ: their log-sum-exp, fp32.
    """
    weight_BHQ1 = torch.sigmoid(more_lse_BHQ - lse_BHQ)[..., None]
    out_BHQd.lerp_(more_BHQd.to(out_BHQd.dtype), weight_BHQ1)
    lse_BHQ.copy_(torch.logaddexp(lse_BHQ, more_lse_BHQ))


def _cuda_backward(
    kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused, as dropout is off
    ends = {"cum_seq_q": None, "cum_seq_k": None, "max_q": q.shape[2], "max_k": k.shape[2]}
    options = {"dropout_p": 0.0, "is_causal": causal, "philox_seed": no_seed, "philox_offset": no_seed, **ends}
    if kernel is Kernel.FLASH:
        op = aten._scaled_dot_product_flash_attention_backward
        return op(grad, q, k, v, out=out, logsumexp=lse, **options)
    op = aten._scaled_dot_product_cudnn_attention_backward
    return op(grad, q, k, v, out=out, logsumexp=lse[..., None], attn_bias=None, **options)


def _for_heads(x_BGKd: Tensor, heads: int) -> Tensor:
    """Repeats heads for the query heads that share them, for kernels without grouped heads: [B, H, K, d]."""
    groups = x_BGKd.shape[1]
    return x_BGKd if heads == groups else x_BGKd.repeat_interleave(heads // groups, dim=1)


def _of_groups(x_BHKd: Tensor, groups: int) -> Tensor:
    """Sums gradients over the query heads that share a head, in fp32: [B, G, K, d]."""
    if x_BHKd.shape[1] == groups:
        return x_BHKd
    return x_BHKd.unflatten(1, (groups, -1)).sum(dim=2, dtype=torch.float32).to(x_BHKd.dtype)


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
    """Cuts the queries so that the scores of each piece stay within MAX_SCORES: (first query, queries)."""
    size = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [(first, q[:, :, first : first + size]) for first in range(0, q.shape[2], size)]
