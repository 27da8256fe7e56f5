"""What losses and metrics need of a router's choice: one pass over logits and scores each way on a GPU.

A layer's losses, counts and entropy as single operations are some forty kernels a micro-batch, which take the host
longer to launch than the device to run. Elsewhere they are plain PyTorch (``reference.router_statistics``).

Shapes: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import first_derivative_only, refuse_tangents, reverse_mode_only
from megatron.optimus.ops.elementwise import check_device, runs_triton
from megatron.optimus.ops.reference import RouterStatistics
from megatron.optimus.ops.router import expert_counts


def router_statistics(logits_TE: Tensor, scores_TE: Tensor, indices_TK: Tensor) -> RouterStatistics:
    """Counts, mean shares, z-loss and entropy of a router on some tokens.

    Args:
        logits_TE: of ``route``, fp32 or fp64.
        scores_TE: of ``route``, in the same dtype.
        indices_TK: chosen experts, int32 or int64 in [0, E).

    Returns:
        See ``RouterStatistics``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if logits_TE.dim() != 2 or logits_TE.shape != scores_TE.shape or indices_TK.shape[:1] != logits_TE.shape[:1]:
        shapes = [tuple(t.shape) for t in (logits_TE, scores_TE, indices_TK)]
        raise ValueError(f"router_statistics: {shapes}; expected logits and scores [T, E] and indices [T, K]")
    check_device("router_statistics", logits_TE, scores_TE, indices_TK)
    if not _has_kernel(logits_TE, scores_TE):
        counts_E = expert_counts(indices_TK, logits_TE.shape[1])
        return reference.router_statistics(logits_TE, scores_TE, counts_E)
    refuse_tangents("router_statistics", logits_TE, scores_TE)
    return RouterStatistics(*_RouterStatistics.apply(logits_TE, scores_TE, indices_TK))


def _has_kernel(logits_TE: Tensor, scores_TE: Tensor) -> bool:
    if not logits_TE.dtype == scores_TE.dtype == torch.float32 or not runs_triton(logits_TE):
        return False
    from megatron.optimus.ops.triton import router_statistics as kernels

    return logits_TE.shape[1] <= kernels.MAX_EXPERTS


class _RouterStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, scores_TE: Tensor, indices_TK: Tensor) -> tuple[Tensor, ...]:
        from megatron.optimus.ops.triton import router_statistics as kernels

        logits_TE, scores_TE = logits_TE.contiguous(), scores_TE.contiguous()
        ctx.save_for_backward(logits_TE, scores_TE)
        ctx.set_materialize_grads(False)
        counts_E, share_E, means_2 = kernels.statistics(logits_TE, scores_TE, indices_TK.contiguous())
        entropy = means_2[1]
        ctx.mark_non_differentiable(counts_E, entropy)
        return counts_E, share_E, means_2[0], entropy

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("router_statistics")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        from megatron.optimus.ops.triton import router_statistics as kernels

        _, dshare_E, dz, _ = grads
        if dshare_E is None and dz is None:
            return None, None, None
        logits_TE, scores_TE = ctx.saved_tensors
        dshare_E = None if dshare_E is None else dshare_E.contiguous()
        return *kernels.gradients(logits_TE, scores_TE, dshare_E, dz), None
