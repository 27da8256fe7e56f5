"""NorMuon (Li et al. 2025, arXiv 2510.05491): Muon whose orthogonalised rows get equal sizes by a second moment.

A row's second moment is the moving average of its mean square after the orthogonalisation. Rows are divided by its
root, and the matrix is scaled back to the norm that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars, WholeMatrices
from deepspeed_ext.optimizers.muon import NS_COEFFICIENTS, Muon, ShardMuon, orthogonalize

_EPS = 1e-10


class ShardNorMuon(ShardMuon):
    """Options of a parameter group: Muon's and beta2."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See MatrixOptimizer.matrix_states."""
        return {"row_moment": (shape[0],)}

    def orthogonalize_(
        self, updates: Sequence[Tensor], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """See ShardMuon.orthogonalize_."""

        def direction(batch_BMN: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            steps, eps, coefficients = options["ns_steps"], options["eps"], options["ns_coefficients"]
            x_BMN = orthogonalize(batch_BMN, steps, eps, coefficients).float()
            moment_BM = torch.lerp(states["row_moment"], x_BMN.square().mean(2), 1 - options["beta2"])
            rows_BMN = x_BMN / (moment_BM.sqrt() + _EPS)[:, :, None]
            norms = (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (x_BMN, rows_BMN))
            return rows_BMN * (next(norms) / (next(norms) + _EPS)), {"row_moment": moment_BM}

        matrices.transform_with_states(updates, direction, scalars.skip)


class NorMuon(Muon):
    """NorMuon for parameter groups of matrices, AdamW for groups with ``use_muon=False``; arguments as of Muon.

    Args:
        params: parameters, or parameter groups.
        beta2: decay rate of the second moment of rows.
        others: the arguments of Muon by name.

    Raises:
        ValueError: an option is out of range, or a group of matrices has a parameter of fewer than two dimensions.
    """

    rule = ShardNorMuon

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **others: Any,
    ) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2={beta2} is out of range; use 0 <= value < 1")
        super().__init__(
            params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, **others
        )
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
        self.defaults["beta2"] = beta2
