"""Sophia-G (Liu et al. 2024, arXiv 2305.14342): momentum divided by an estimate of the loss's curvature, and clipped.

Every few steps the caller runs a backward of the cross-entropy with labels drawn from the model's own predictions. Its
gradient g, the mean over B labels, gives the Gauss-Newton-Bartlett estimate B * g * g of the diagonal (the paper's
algorithm 2), which ``update_curvature_`` averages into the state "hessian".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import CurvatureOptimizer, Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import BlockOptimizer, ShardBlock, blocks_of, check_options


class ShardSophia(BlockOptimizer, CurvatureOptimizer):
    """Options of a parameter group: lr, betas, gamma, eps, weight_decay (decoupled), maximize, state_dtype."""

    state_kinds = ("exp_avg", "hessian")
    unsigned_kinds = frozenset({"hessian"})

    def update_block(self, block: ShardBlock, options: Mapping[str, Any]) -> None:
        """See BlockOptimizer.update_block."""
        m = torch.lerp(block.read("exp_avg"), block.gradient(), 1 - options["betas"][0])
        scale = (options["gamma"] * block.read("hessian")).clamp(min=options["eps"])
        update = (m / scale).clamp(-1.0, 1.0)
        block.write_weights(block.master * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * update)
        block.write("exp_avg", m)

    def update_curvature_(
        self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars, num_labels: Tensor
    ) -> None:
        """See CurvatureOptimizer.update_curvature_."""
        for block in blocks_of(shard, self.state_kinds, scalars):
            estimate = num_labels * block.gradient().square()
            block.write("hessian", torch.lerp(block.read("hessian"), estimate, 1 - options["betas"][1]))


class Sophia(ShardableOptimizer):
    """Sophia-G. Without calls of ``update_curvature`` its Hessian stays 0 and it is a sign method.

    With ``deepspeed_ext.initialize`` run a backward of the sampled loss every ten steps or so, before the step's own
    ones, and then ``engine.optimizer.update_curvature(num_labels)``.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate, which is also the largest change of an element.
        betas: decay rates of momentum and Hessian.
        gamma: factor on the Hessian: larger clips less. The paper's is 0.05 for the 125 M model (Sophia-G).
        eps: least denominator.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardSophia

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.96, 0.99),
        gamma: float = 0.05,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, gamma=gamma, eps=eps)
        options = {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})
