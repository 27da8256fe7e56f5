"""Distributed Shampoo (Anil et al. 2020, arXiv 2002.09018): blocks of matrices between inverse roots of factors.

The factors of a block are moving averages of G G^T and G^T G; their inverse fourth roots are computed by the owner
every ``precondition_frequency`` steps. Until the first roots exist, and for a block whose roots cannot be computed, the
direction is that of the grafted optimizer. Grafting gives every matrix's update the norm that RMSProp's (or the plain
gradient) would have, so that its learning rate carries over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import StepScalars
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW, OwnerOptimizer

logger = logging.getLogger("deepspeed_ext")

GRAFTS = ("rmsprop", "sgd")
_SMALLEST = 1e-30  # of eigenvalues and norms: a block without gradients must not give NaN
_warned: list[bool] = []  # that a root could not be computed


class ShardShampoo(OwnerOptimizer):
    """Options: lr, weight_decay, matrix_betas, eps, graft_eps, graft, block_size, precondition_frequency."""

    def matrix_states(self, shape: tuple[int, int], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """See MatrixOptimizer.matrix_states. Roots are zero until they are computed."""
        rows, columns, count = _blocks(shape, options["block_size"])
        states: dict[str, tuple[int, ...]] = {"exp_avg": shape}
        if options["graft"] == "rmsprop":
            states["exp_avg_sq"] = shape
        for side, size in (("left", rows), ("right", columns)):
            states |= {f"{side}_factor": (count, size, size), f"{side}_root": (count, size, size)}
        return states

    def direction(
        self, grads_BMN: Tensor, states: dict[str, Tensor], options: Mapping[str, Any], scalars: StepScalars
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See OwnerOptimizer.direction."""
        beta1, beta2 = options["matrix_betas"]
        new: dict[str, Tensor] = {}
        graft_BMN = grads_BMN
        if options["graft"] == "rmsprop":
            new["exp_avg_sq"] = torch.lerp(states["exp_avg_sq"], grads_BMN.square(), 1 - beta2)
            variance_BMN = new["exp_avg_sq"] / (1 - beta2**scalars.host_step)
            graft_BMN = grads_BMN / (variance_BMN.sqrt() + options["graft_eps"])
        blocks = _split(grads_BMN, options["block_size"])  # [B, count, rows, columns]
        for side, gram in (("left", blocks @ blocks.mT), ("right", blocks.mT @ blocks)):
            new[f"{side}_factor"] = torch.lerp(states[f"{side}_factor"], gram, 1 - beta2)
            root = states[f"{side}_root"]
            if scalars.host_step % options["precondition_frequency"] == 0:
                root = new[f"{side}_root"] = _inverse_fourth_root(new[f"{side}_factor"], options["eps"], root)
        left, right = (new.get(kind, states[kind]) for kind in ("left_root", "right_root"))
        is_ready = (left.flatten(2).any(2) & right.flatten(2).any(2))[..., None, None]
        direction = torch.where(is_ready, left @ blocks @ right, _split(graft_BMN, options["block_size"]))
        direction_BMN = _joined(direction, grads_BMN.shape)
        direction_BMN = direction_BMN * (_norm(graft_BMN) / _norm(direction_BMN).clamp(min=_SMALLEST))
        new["exp_avg"] = torch.lerp(states["exp_avg"], direction_BMN, 1 - beta1)
        return new["exp_avg"], new


def _blocks(shape: tuple[int, int], block_size: int) -> tuple[int, int, int]:
    """Rows and columns of a block of a matrix, and the number of blocks; the last ones are filled up with zeros."""
    rows, columns = (min(block_size, size) for size in shape)
    return rows, columns, -(-shape[0] // rows) * -(-shape[1] // columns)


def _split(x_BMN: Tensor, block_size: int) -> Tensor:
    rows, columns, _ = _blocks((x_BMN.shape[1], x_BMN.shape[2]), block_size)
    padded = torch.nn.functional.pad(x_BMN, (0, -x_BMN.shape[2] % columns, 0, -x_BMN.shape[1] % rows))
    return padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).transpose(2, 3).flatten(1, 2)


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The matrices whose ``_split`` is ``blocks``."""
    rows = blocks.shape[2]
    grid = blocks.unflatten(1, (-(-shape[1] // rows), -1)).transpose(2, 3)
    return grid.flatten(3, 4).flatten(1, 2)[:, : shape[1], : shape[2]]


def _norm(x_BMN: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_BMN, dim=(1, 2), keepdim=True)


def _inverse_fourth_root(factor: Tensor, eps: float, previous: Tensor) -> Tensor:
    """factor^(-1/4) with eps times the mean eigenvalue on the diagonal; the previous root where it is not finite."""
    size = factor.shape[-1]
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = (eps * mean)[..., None, None] * torch.eye(size, device=factor.device)
    try:
        values, vectors = torch.linalg.eigh(factor + ridge)
        root = (vectors * values.clamp(min=_SMALLEST).pow(-0.25).unsqueeze(-2)) @ vectors.mT
    except torch.linalg.LinAlgError:
        root = torch.full_like(factor, torch.nan)
    is_good = root.isfinite().flatten(-2).all(-1)
    # A block without gradients keeps the zeros that say so; roots are computed so rarely that the host may wait.
    num_bad = int((~is_good).sum())
    if num_bad and not _warned:
        _warned.append(True)
        logger.warning(
            "Shampoo: %d of %d inverse roots are not finite; their blocks keep the previous ones, or without any the "
            "direction of the grafted optimizer. If the loss suffers, raise eps=%g. Said once.",
            num_bad,
            is_good.numel(),
            eps,
        )
    return torch.where((is_good & (mean > 0))[..., None, None], root, previous)


class Shampoo(MatrixAndAdamW):
    """Distributed Shampoo for parameter groups of matrices, AdamW for groups with ``use_muon=False``.

    Args:
        params: parameters, or parameter groups.
        lr: of both kinds of groups.
        weight_decay: likewise; decoupled.
        matrix_betas: decay rates of the momentum of updates, and of the factors and the second moment of grafting.
        eps: times a factor's mean eigenvalue, added to its eigenvalues.
        graft_eps: added to the root of the second moment.
        graft: whose norm an update gets: "rmsprop" (with bias correction) or "sgd".
        block_size: longest side of a block.
        precondition_frequency: steps from one computation of the inverse roots to the next.
        use_muon: False for a group that AdamW updates.
        betas: of AdamW groups.
        adam_eps: of AdamW groups.
        state_dtype: of AdamW groups; a matrix's states are fp32.

    Raises:
        ValueError: an option is out of range, or a parameter is no matrix.
    """

    rule = ShardShampoo

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        matrix_betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        graft_eps: float = 1e-8,
        graft: str = "rmsprop",
        block_size: int = 1024,
        precondition_frequency: int = 20,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        state_dtype: str = "fp32",
    ) -> None:
        if precondition_frequency < 1 or block_size < 1:
            raise ValueError(
                f"precondition_frequency={precondition_frequency} and block_size={block_size} must be at least 1"
            )
        if graft not in GRAFTS:
            raise ValueError(f"graft={graft!r} is unknown; use {' or '.join(GRAFTS)}")
        options = {"lr": lr, "weight_decay": weight_decay, "matrix_betas": matrix_betas, "eps": eps, "graft": graft}
        options |= {"graft_eps": graft_eps, "block_size": block_size, "precondition_frequency": precondition_frequency}
        super().__init__(params, options, use_muon=use_muon, betas=betas, adam_eps=adam_eps, state_dtype=state_dtype)
