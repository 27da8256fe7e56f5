"""Muon (Jordan et al. 2024): orthogonalised momentum for hidden matrices, and AdamW for all other parameters.

The direction of a matrix is U V^T of its momentum's singular value decomposition, approximated by a quintic
Newton-Schulz iteration that consists of matrix products alone. All matrices of one shape that a rank owns (the experts
of a layer, for example) are iterated in one batch. Clipping and averaging scale the gradient before the momentum; no
clip coefficient scales the orthogonalised update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import BATCH_ELEMENTS, MatrixOptimizer, Shard, StepScalars, WholeMatrices
from deepspeed_ext.optimizers.kernels import kernels_for
from deepspeed_ext.optimizers.kernels.options import MomentumOptions
from deepspeed_ext.optimizers.owner_states import MatrixAndAdamW

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the paper's: steepest at zero; singular values end in 0.7 .. 1.2


def orthogonalize(
    matrices_BMN: Tensor, steps: int, eps: float, coefficients: Sequence[float] = NS_COEFFICIENTS
) -> Tensor:
    """Orthogonalises matrices approximately by a quintic Newton-Schulz iteration.

    Every matrix is divided by its Frobenius norm; then X <- a X + (b X X^T + c (X X^T)^2) X is applied ``steps`` times,
    to the transpose where that makes X X^T smaller. Large batches are split, which bounds the workspace.

    Args:
        matrices_BMN: [B, M, N] in any float dtype; the computation is in this dtype.
        steps: number of iterations.
        eps: least value of the norm.
        coefficients: (a, b, c).

    Returns:
        [B, M, N] with singular values between about 0.7 and 1.2.
    """
    part = max(1, BATCH_ELEMENTS // matrices_BMN[0].numel())
    if matrices_BMN.shape[0] > part:
        parts = [orthogonalize(some, steps, eps, coefficients) for some in matrices_BMN.split(part)]
        return torch.cat(parts)
    a, b, c = coefficients
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if is_tall else matrices_BMN
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def lr_ratio(adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """Computes the factor on the learning rate for a matrix of one shape.

    Args:
        adjust_lr_fn: as in torch.optim.Muon. "original" or None: sqrt(max(1, rows / columns)) (Jordan et al. 2024).
            "match_rms_adamw": 0.2 sqrt(max(rows, columns)), which makes the update as large as AdamW's usual one, so
            that AdamW's lr and weight decay carry over (Liu et al. 2025).
        shape: (rows, columns).

    Raises:
        ValueError: the name is unknown.
    """
    rows, columns = shape
    if adjust_lr_fn in (None, "original"):
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is unknown; use original or match_rms_adamw")


class ShardMuon(MatrixOptimizer):
    """Runs Muon and torch.optim.Muon on whole matrices.

    Options of a parameter group: lr, momentum, nesterov, weight_decay (decoupled), ns_steps, ns_coefficients, eps and
    adjust_lr_fn as in torch.optim.Muon; ns_dtype, maximize, state_dtype.
    """

    state_kinds = ("momentum_buffer",)

    def update_matrices_(
        self, shards: Sequence[Shard], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """See MatrixOptimizer.update_matrices_."""
        device = shards[0].master.device
        kernels = kernels_for(device.type)
        dtype = options.get("ns_dtype") or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        momentum = MomentumOptions.from_group(options)
        # Zeros: a skipped step leaves the updates as they are, and padding must not be NaN.
        updates = [torch.zeros_like(shard.master, dtype=dtype) for shard in shards]
        for shard, update in zip(shards, updates, strict=True):
            kernels.momentum(shard, momentum, scalars, update)

        self.orthogonalize_(updates, matrices, options, scalars)
        lr, decay = float(options["lr"]), 1 - float(options["lr"]) * float(options["weight_decay"])
        for index, (shard, update) in enumerate(zip(shards, updates, strict=True)):
            for start, stop, shape in matrices.ranges(index):
                part, matrix_lr = slice(start, stop), lr * lr_ratio(options["adjust_lr_fn"], shape)
                kernels.apply_update(shard.master[part], shard.param[part], update[part], decay, matrix_lr, scalars)

    def orthogonalize_(
        self, updates: Sequence[Tensor], matrices: WholeMatrices, options: Mapping[str, Any], scalars: StepScalars
    ) -> None:
        """Replaces every whole matrix in ``updates`` by its orthogonalised one. Collective."""
        steps, eps, coefficients = options["ns_steps"], options["eps"], options["ns_coefficients"]
        matrices.transform(updates, lambda batch_BMN: orthogonalize(batch_BMN, steps, eps, coefficients))


class Muon(MatrixAndAdamW):
    """Muon for parameter groups of matrices, AdamW for groups with ``use_muon=False`` (norms, embeddings, head).

    Parameters may have more than two dimensions: leading ones count matrices, see ``base.count_matrices``.

    Args:
        params: parameters, or parameter groups.
        lr: of Muon and AdamW groups.
        weight_decay: likewise; decoupled.
        momentum: this and the next five are those of torch.optim.Muon.
        nesterov: whether the update looks one step ahead.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: least norm that a matrix is divided by.
        ns_steps: number of iterations.
        adjust_lr_fn: see ``lr_ratio``.
        use_muon: False for a group that AdamW updates.
        betas: of AdamW groups.
        adam_eps: of AdamW groups.
        ns_dtype: dtype of the Newton-Schulz iteration; None is bf16, on the CPU fp32.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range, or a Muon group has a parameter of fewer than two dimensions.
    """

    rule = ShardMuon

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        ns_dtype: torch.dtype | None = None,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is out of range; use 0 <= value < 1")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps} is out of range; use 1 to 99, 5 is usual")
        lr_ratio(adjust_lr_fn, (1, 1))
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        options |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        options |= {"ns_dtype": ns_dtype, "maximize": maximize}
        super().__init__(params, options, use_muon=use_muon, betas=betas, adam_eps=adam_eps, state_dtype=state_dtype)
