"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

Each side of a matrix has a factor, the moving average of G G^T or G^T G, and an eigenbasis of it, which one power
iteration and a QR decomposition renew every ``precondition_frequency`` steps. The first step only starts the factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW, OwnerOptimizer

# Times the largest eigenvalue, on the diagonal of a first factor, in growing steps. A first gradient leaves directions
# of eigenvalue zero, whose basis rounding would choose, another one at every layout of ranks. In fp64 this decides.
_TIE_BREAK = 1e-8


class ShardSOAP(OwnerOptimizer):
    """Options of a parameter group: lr, weight_decay, matrix_betas, eps, precondition_frequency, max_dim."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See MatrixOptimizer.matrix_states. A side that is longer than ``max_dim`` has no basis."""
        states: dict[str, tuple[int, ...]] = {"exp_avg": shape, "exp_avg_sq": shape}
        for side, size in zip(("left", "right"), shape, strict=True):
            if size <= options["max_dim"]:
                states |= {f"{side}_factor": (size, size), f"{side}_basis": (size, size)}
        return states

    def direction(
        self, grads_BMN: Tensor, states: dict[str, Tensor], options: Mapping[str, Any], scalars: StepScalars
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See OwnerOptimizer.direction."""
        beta1, beta2 = options["matrix_betas"]
        step = scalars.host_step - 1
        if step == 0:
            new: dict[str, Tensor] = {}
            for side, gram_BSS in _grams(grads_BMN.double(), states).items():
                new[f"{side}_factor"] = ((1 - beta2) * gram_BSS).float()
                new[f"{side}_basis"] = _eigenbasis(gram_BSS).float()
            return torch.zeros_like(grads_BMN), new
        left, right = states.get("left_basis"), states.get("right_basis")
        exp_avg = torch.lerp(states["exp_avg"], grads_BMN, 1 - beta1)
        exp_avg_sq = torch.lerp(states["exp_avg_sq"], _into(grads_BMN, left, right).square(), 1 - beta2)
        update = _into(exp_avg, left, right) / (exp_avg_sq.sqrt() + options["eps"])
        update = _out_of(update, left, right) * (math.sqrt(1 - beta2**step) / (1 - beta1**step))
        new = {"exp_avg": exp_avg}
        for side, gram_BSS in _grams(grads_BMN, states).items():
            new[f"{side}_factor"] = torch.lerp(states[f"{side}_factor"], gram_BSS, 1 - beta2)
        if step % options["precondition_frequency"] == 0:
            for side, dim in (("left", 1), ("right", 2)):
                if f"{side}_factor" in new:
                    basis, exp_avg_sq = _renewed(new[f"{side}_factor"], states[f"{side}_basis"], exp_avg_sq, dim)
                    new[f"{side}_basis"] = basis
        return update, new | {"exp_avg_sq": exp_avg_sq}


def _grams(grads_BMN: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """G G^T and G^T G of the sides that have a factor."""
    sides = {"left": grads_BMN, "right": grads_BMN.mT}
    return {side: g @ g.mT for side, g in sides.items() if f"{side}_factor" in states}


def _eigenbasis(gram_BSS: Tensor) -> Tensor:
    """Eigenvectors in columns, by falling eigenvalue."""
    size = gram_BSS.shape[-1]
    ramp_S = torch.arange(size, 0, -1, dtype=gram_BSS.dtype, device=gram_BSS.device) / size
    largest_B1 = gram_BSS.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
    _, vectors_BSS = torch.linalg.eigh(gram_BSS + torch.diag_embed(_TIE_BREAK * largest_B1 * ramp_S))
    return vectors_BSS.flip(2)


def _renewed(factor_BSS: Tensor, basis_BSS: Tensor, exp_avg_sq: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """One power iteration from the old basis, its columns sorted; the second moment in the same order along ``dim``."""
    product_BSS = factor_BSS @ basis_BSS
    order_BS = (basis_BSS * product_BSS).sum(1).argsort(dim=1, descending=True, stable=True)
    columns = order_BS[:, None, :].expand_as(product_BSS)
    moved = order_BS[:, :, None] if dim == 1 else order_BS[:, None, :]
    return torch.linalg.qr(product_BSS.gather(2, columns))[0], exp_avg_sq.gather(dim, moved.expand_as(exp_avg_sq))


def _into(x_BMN: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    x_BMN = x_BMN if left is None else left.mT @ x_BMN
    return x_BMN if right is None else x_BMN @ right


def _out_of(x_BMN: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    x_BMN = x_BMN if left is None else left @ x_BMN
    return x_BMN if right is None else x_BMN @ right.mT


class SOAP(MatrixAndAdamW):
    """SOAP for parameter groups of matrices, AdamW for groups with ``use_muon=False``.

    Args:
        params: parameters, or parameter groups.
        lr: of both kinds of groups.
        weight_decay: likewise; decoupled.
        matrix_betas: decay rates of the first moment, and of the second moment and the factors.
        eps: added to the root of the second moment.
        precondition_frequency: steps from one renewal of the eigenbases to the next.
        max_dim: a side of a matrix that is longer keeps its own basis.
        use_muon: False for a group that AdamW updates.
        betas: of AdamW groups.
        adam_eps: of AdamW groups.
        state_dtype: of AdamW groups; a matrix's states are fp32.

    Raises:
        ValueError: an option is out of range, or a parameter is no matrix.
    """

    rule = ShardSOAP

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
        matrix_betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        precondition_frequency: int = 10,
        max_dim: int = 8192,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        state_dtype: str = "fp32",
    ) -> None:
        if precondition_frequency < 1 or max_dim < 1:
            raise ValueError(
                f"precondition_frequency={precondition_frequency} and max_dim={max_dim} must be at least 1"
            )
        options = {"lr": lr, "weight_decay": weight_decay, "matrix_betas": matrix_betas, "eps": eps}
        options |= {"precondition_frequency": precondition_frequency, "max_dim": max_dim}
        super().__init__(params, options, use_muon=use_muon, betas=betas, adam_eps=adam_eps, state_dtype=state_dtype)
