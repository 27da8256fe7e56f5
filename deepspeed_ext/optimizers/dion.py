"""Dion (Ahn et al. 2025, arXiv 2504.05295): orthonormal updates of low rank with error feedback.

One power iteration from the right basis of the last step gives a low-rank approximation P R^T of the momentum. The
momentum loses a part of what the approximation holds and keeps the rest; the update is P times the basis of normalised
columns of R.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW, OwnerOptimizer


class ShardDion(OwnerOptimizer):
    """Options of a parameter group: lr, weight_decay, momentum, rank_fraction, eps."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See MatrixOptimizer.matrix_states."""
        rank = max(1, math.ceil(options["rank_fraction"] * min(shape)))
        return {"momentum": shape, "basis": (shape[1], rank)}

    def new_matrix_states(
        self, count: int, shape: tuple[int, int], options: Mapping[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """See MatrixOptimizer.new_matrix_states. Matrices of one shape begin with the same random basis."""
        states = super().new_matrix_states(count, shape, options, device)
        generator = torch.Generator().manual_seed(shape[0] * 1_000_003 + shape[1])  # the same at every layout of ranks
        states["basis"].copy_(torch.randn(states["basis"].shape[1:], generator=generator))
        return states

    def lr_ratio(self, shape: tuple[int, int]) -> float:
        """See OwnerOptimizer.lr_ratio."""
        return math.sqrt(shape[0] / shape[1])

    def direction(
        self, grads_BMN: Tensor, states: dict[str, Tensor], options: Mapping[str, Any], scalars: StepScalars
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See OwnerOptimizer.direction."""
        momentum_BMN = states["momentum"] + grads_BMN
        left_BMR, _ = torch.linalg.qr(momentum_BMN @ states["basis"])
        right_BNR = momentum_BMN.mT @ left_BMR
        basis_BNR = right_BNR / (torch.linalg.vector_norm(right_BNR, dim=1, keepdim=True) + options["eps"])
        kept_BMN = torch.baddbmm(momentum_BMN, left_BMR, right_BNR.mT, alpha=options["momentum"] - 1)
        # An expert that has had no token yet: its basis would become zero, and stay so.
        has_any = momentum_BMN.flatten(1).any(1)[:, None, None]
        new = {"momentum": kept_BMN, "basis": torch.where(has_any, basis_BNR, states["basis"])}
        return left_BMR @ basis_BNR.mT, new


class Dion(MatrixAndAdamW):
    """Dion for parameter groups of matrices, AdamW for groups with ``use_muon=False``.

    The learning rate of a matrix is multiplied by sqrt(rows / columns).

    Args:
        params: parameters, or parameter groups.
        lr: of both kinds of groups.
        weight_decay: likewise; decoupled.
        momentum: share of the approximated momentum that stays.
        rank_fraction: rank of updates as a share of a matrix's shorter side.
        eps: added to the norms of columns.
        use_muon: False for a group that AdamW updates.
        betas: of AdamW groups.
        adam_eps: of AdamW groups.
        state_dtype: of AdamW groups; a matrix's states are fp32.

    Raises:
        ValueError: an option is out of range, or a parameter is no matrix.
    """

    rule = ShardDion

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        rank_fraction: float = 0.25,
        eps: float = 1e-8,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        state_dtype: str = "fp32",
    ) -> None:
        if not 0 < rank_fraction <= 1 or not 0 <= momentum < 1:
            raise ValueError(
                f"rank_fraction={rank_fraction} and momentum={momentum} are out of range; use 0 < rank_fraction <= 1 "
                "and 0 <= momentum < 1"
            )
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rank_fraction": rank_fraction}
        options["eps"] = eps
        super().__init__(params, options, use_muon=use_muon, betas=betas, adam_eps=adam_eps, state_dtype=state_dtype)
