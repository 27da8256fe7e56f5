"""Normalisation layers; statistics are computed in fp32 whatever the dtype.

To add one: a value of ``Normalization`` (config/choices.py), a class here and its case in ``build_norm``. Its weights,
memory and traffic are declared where config/family.py, models/activations.py and work.py ask for ``Normalization``. The
norms of queries and keys are always ``RMSNorm``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import ModelConfig, Normalization
from megatron.optimus.layers.rope import RopeTable


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, rope: RopeTable | None = None, residual: tuple[Tensor | None] | None = None) -> Any:
        """The norm of x [..., width]; with ``rope`` x is queries or keys [B, S, H, d], which are rotated too.

        A norm of the width d is then over each head, one of H * d over all heads; the result is [B, H, S, d].
        ``residual`` is for ``add_norm``.
        """
        if residual is not None:
            return ops.add_rms_norm(x, *residual, self.weight, self.eps)
        if rope is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.norm_rotate(x, self.weight, self.eps, *rope)


class NonparametricLayerNorm(nn.Module):
    """LayerNorm without scale and shift, as in OLMo-1B."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dim in fp32; shape and dtype are those of x."""
        if x.is_cuda:  # CUDA's kernel computes in fp32; the CPU's rounds within the backward
            return F.layer_norm(x, (self.width,), eps=self.eps)
        return F.layer_norm(x.float(), (self.width,), eps=self.eps).to(x.dtype)


def add_norm(norm: nn.Module, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Adds a sublayer's output to the residual stream and normalises the sum for the next one.

    Args:
        norm: of a block.
        x: the residual stream [..., width].
        y: the sublayer's output, of x's shape; None: nothing is added.

    Returns:
        The sum and its norm.
    """
    # A norm that is recomputed (its forward is replaced, see parallel/recompute.py) must keep the sum, not x and y.
    if isinstance(norm, RMSNorm) and "forward" not in vars(norm):
        total, normed = norm(x, None, (y,))
        return total, normed
    x = x if y is None else x + y
    return x, norm(x)


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm of ``config.normalization``: before attention, before the MLP, and at the end of the decoder."""
    if config.normalization is Normalization.RMSNORM:
        return RMSNorm(config.hidden_size, config.norm_epsilon)
    return NonparametricLayerNorm(config.hidden_size, config.norm_epsilon)
