"""GaLore (Zhao et al. 2024, arXiv 2403.03507): Adam on gradients that are projected to a low rank.

The projector of a matrix is the leading singular vectors of its gradient on its shorter side, computed by the owner
every ``update_proj_gap`` steps. The moments live in the projected space: for a matrix [M, N] with M >= N and rank r
they are [M, r], and the projector is [N, r].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars, count_matrices
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW, OwnerOptimizer


class ShardGaLore(OwnerOptimizer):
    """Options of a parameter group: lr, weight_decay, matrix_betas, eps, rank, update_proj_gap, scale."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See MatrixOptimizer.matrix_states. A matrix whose shorter side is below the rank has that as its rank."""
        long, short = max(shape), min(shape)
        rank = min(options["rank"], short)
        return {"projector": (short, rank), "exp_avg": (long, rank), "exp_avg_sq": (long, rank)}

    def direction(
        self, grads_BMN: Tensor, states: dict[str, Tensor], options: Mapping[str, Any], scalars: StepScalars
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See OwnerOptimizer.direction."""
        beta1, beta2 = options["matrix_betas"]
        step, is_wide = scalars.host_step, grads_BMN.shape[1] < grads_BMN.shape[2]
        grads_BLS = grads_BMN.mT if is_wide else grads_BMN  # the shorter side last
        projector_BSR, new = states["projector"], {}
        if (step - 1) % options["update_proj_gap"] == 0:
            # Right singular vectors of G are eigenvectors of G^T G, of which eigh puts the largest last.
            _, vectors_BSS = torch.linalg.eigh(grads_BLS.mT @ grads_BLS)
            vectors_BSR = vectors_BSS.flip(2)[:, :, : projector_BSR.shape[2]]
            # The moments go on in the new basis, so its signs, which eigh leaves open, are those of the old one.
            signs_B1R = torch.where((projector_BSR * vectors_BSR).sum(1, keepdim=True) < 0, -1.0, 1.0)
            new["projector"] = projector_BSR = vectors_BSR * signs_B1R
        low_BLR = grads_BLS @ projector_BSR
        new["exp_avg"] = torch.lerp(states["exp_avg"], low_BLR, 1 - beta1)
        new["exp_avg_sq"] = torch.lerp(states["exp_avg_sq"], low_BLR.square(), 1 - beta2)
        size = options["scale"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        update_BLS = (size * new["exp_avg"] / (new["exp_avg_sq"].sqrt() + options["eps"])) @ projector_BSR.mT
        return update_BLS.mT if is_wide else update_BLS, new


def _shorter_side(param: Tensor) -> int:
    """Of the whole matrices, of which the parameter may hold parts."""
    _, shape = count_matrices("", param.shape, getattr(param, "stacked_matrices", 1))
    sides, parts = list(shape), getattr(param, "partition_count", 1)
    sides[1 if getattr(param, "partition_dim", -1) == param.dim() - 1 else 0] *= parts
    return min(sides)


class GaLore(MatrixAndAdamW):
    """GaLore's AdamW for parameter groups of matrices, AdamW for groups with ``use_muon=False``.

    Args:
        params: parameters, or parameter groups.
        lr: of both kinds of groups.
        weight_decay: likewise; decoupled.
        matrix_betas: decay rates of the projected moments.
        eps: added to the root of the second one.
        rank: of the projection; matrices with a shorter side are not reduced.
        update_proj_gap: steps from one projector to the next.
        scale: factor on the updates of matrices.
        use_muon: False for a group that AdamW updates.
        betas: of AdamW groups.
        adam_eps: of AdamW groups.
        state_dtype: of AdamW groups; a matrix's states are fp32.

    Raises:
        ValueError: an option is out of range, the rank exceeds the shorter side of every matrix, or a parameter is no
            matrix.
    """

    rule = ShardGaLore

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        matrix_betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        state_dtype: str = "fp32",
    ) -> None:
        if rank < 1 or update_proj_gap < 1:
            raise ValueError(f"rank={rank} and update_proj_gap={update_proj_gap} must be at least 1")
        options = {"lr": lr, "weight_decay": weight_decay, "matrix_betas": matrix_betas, "eps": eps, "rank": rank}
        options |= {"update_proj_gap": update_proj_gap, "scale": scale}
        super().__init__(params, options, use_muon=use_muon, betas=betas, adam_eps=adam_eps, state_dtype=state_dtype)
        for group in self.param_groups:
            most = max((_shorter_side(param) for param in group["params"] if group["use_muon"]), default=group["rank"])
            if group["rank"] > most:
                raise ValueError(f"rank={group['rank']} exceeds the shorter side of every matrix; use at most {most}")
