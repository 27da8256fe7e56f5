"""LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2): Adam's update of each tensor, as long as the tensor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import ShardBlock, bias_correction, check_options
from deepspeed_ext.optimizers.whole_tensors import Rounds, TensorOptimizer, WholeTensors


class ShardLamb(TensorOptimizer):
    """Options of a parameter group: lr, betas, eps, weight_decay, max_weight_norm, correct_bias, maximize,
    state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """See TensorOptimizer.update_tensors_. The update is computed twice, which needs no memory for it."""
        beta1, beta2 = options["betas"]
        own = tensors.zeros(2)
        for block in tensors.blocks(shards, self.state_kinds, scalars, options["maximize"]):
            gradient = block.gradient()
            block.write("exp_avg", torch.lerp(block.read("exp_avg"), gradient, 1 - beta1))
            block.write("exp_avg_sq", beta2 * block.read("exp_avg_sq") + (1 - beta2) * gradient.square())
            block.sum_into(own[0], block.master.square())
            block.sum_into(own[1], self._direction(block, options).square())
        sums = yield own
        norms, lengths = sums.sqrt().unbind()
        ratios = norms.clamp(max=options["max_weight_norm"]) / (lengths + options["eps"])
        ratios = torch.where((norms > 0) & (lengths > 0), ratios, 1.0)
        for block in tensors.blocks(shards, self.state_kinds, scalars):
            step = options["lr"] * block.spread(ratios) * self._direction(block, options)
            block.write_weights(block.master - step)

    @staticmethod
    def _direction(block: ShardBlock, options: Mapping[str, Any]) -> Tensor:
        m, v, (beta1, beta2) = block.read("exp_avg"), block.read("exp_avg_sq"), options["betas"]
        if options["correct_bias"]:
            m = m / bias_correction(beta1, block.scalars.step)
            v = v / bias_correction(beta2, block.scalars.step)
        return m / (v.sqrt() + options["eps"]) + options["weight_decay"] * block.master


class Lamb(ShardableOptimizer):
    """LAMB: AdamW's direction, weight decay included, scaled for each tensor to its weights' norm.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment and to the direction's norm.
        weight_decay: part of the direction.
        max_weight_norm: largest norm of weights that counts.
        correct_bias: divide the moments by 1 - beta^step, as the paper does.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardLamb

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        max_weight_norm: float = 10.0,
        *,
        correct_bias: bool = True,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, eps=eps, max_weight_norm=max_weight_norm)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"max_weight_norm": max_weight_norm, "correct_bias": correct_bias}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})
