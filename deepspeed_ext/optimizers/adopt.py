"""ADOPT (Taniguchi et al. 2024, arXiv 2411.02853): Adam that converges for any second decay rate.

The gradient is divided by the root of the second moment before this step's gradient enters it, and clipped; then it
enters the momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.base import ShardableOptimizer
from deepspeed_ext.optimizers.blocks import BlockOptimizer, ShardBlock, check_options


class ShardADOPT(BlockOptimizer):
    """Options of a parameter group: lr, betas, eps, weight_decay (decoupled), maximize, state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_block(self, block: ShardBlock, options: Mapping[str, Any]) -> None:
        """See BlockOptimizer.update_block. The first step only measures the second moment."""
        (beta1, beta2), lr = options["betas"], options["lr"]
        gradient, m, v = block.gradient(), block.read("exp_avg"), block.read("exp_avg_sq")
        begins = block.scalars.step == 1
        limit = (block.scalars.step - 1).clamp(min=1) ** 0.25
        normed = gradient / v.sqrt().clamp(min=options["eps"])
        normed = torch.maximum(torch.minimum(normed, limit), -limit)
        new_m = torch.lerp(m, normed, 1 - beta1)
        master = block.master * (1 - lr * options["weight_decay"]) - lr * new_m
        squares = gradient.square()
        block.write_weights(torch.where(begins, block.master, master))
        block.write("exp_avg", torch.where(begins, m, new_m))
        block.write("exp_avg_sq", torch.where(begins, squares, beta2 * v + (1 - beta2) * squares))


class ADOPT(ShardableOptimizer):
    """ADOPT with clipping, algorithm 2 of the paper: the t-th update is clipped to t^(1/4).

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of momentum and second moment.
        eps: least root of the second moment.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardADOPT

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, eps=eps)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})
