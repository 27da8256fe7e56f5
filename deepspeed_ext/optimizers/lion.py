"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, ShardOptimizer, StepScalars
from deepspeed_ext.optimizers.kernels import kernels_for
from deepspeed_ext.optimizers.kernels.options import LionOptions


class ShardLion(ShardOptimizer):
    """Options of a group: lr, betas, weight_decay, maximize, state_dtype."""

    state_kinds = ("exp_avg",)

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        kernels_for(shard.master.device.type).lion(shard, LionOptions.of(options), scalars)


class Lion(ShardableOptimizer):
    """Steps by the sign of an interpolation between momentum and gradient, with decoupled weight decay.

    One moment instead of Adam's two. The paper takes an lr 3 to 10 times below AdamW's and a weight_decay larger by
    the same factor. ``state_dtype``: "fp32", "bf16" or "int8". Raises ValueError for options out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} are out of range; use 0 <= beta < 1")
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "state_dtype": state_dtype})

    def shard_optimizer(self, group: Mapping[str, Any]) -> ShardOptimizer:
        """See ShardableOptimizer.shard_optimizer."""
        return ShardLion()
