"""MARS (Yuan et al. 2024, arXiv 2411.10438): AdamW on gradients from which part of their noise has been subtracted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import ShardBlock, bias_correction, check_options
from deepspeed_ext.optimizers.whole_tensors import Rounds, TensorOptimizer, WholeTensors


class ShardMARS(TensorOptimizer):
    """Options of a parameter group: lr, betas, gamma, vector_betas, eps, weight_decay (decoupled), maximize,
    state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq", "last_grad")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """See TensorOptimizer.update_tensors_. Vectors (norms, biases) get AdamW with ``vector_betas``."""
        maximize, own = options["maximize"], tensors.zeros()
        for block in tensors.blocks(shards, self.state_kinds, scalars, maximize):
            block.sum_into(own, self._corrected(block, options).square())
        sums = yield own
        shrink_T = 1 / sums.sqrt().clamp(min=1.0)
        first_T, second_T = map(tensors.choose, options["betas"], options["vector_betas"])
        bias1_T, bias2_T = bias_correction(first_T, scalars.step), bias_correction(second_T, scalars.step)
        for block in tensors.blocks(shards, self.state_kinds, scalars, maximize):
            gradient, is_matrix = block.gradient(), block.spread(tensors.is_matrix_T) > 0
            corrected = torch.where(is_matrix, self._corrected(block, options) * block.spread(shrink_T), gradient)
            old_m, old_v = block.read("exp_avg"), block.read("exp_avg_sq")
            m = old_m + block.spread(1 - first_T) * (corrected - old_m)
            v = old_v + block.spread(1 - second_T) * (corrected.square() - old_v)
            denominator = (v.sqrt() + options["eps"]) / block.spread(bias2_T.sqrt(), padding=1.0)
            update = m / (block.spread(bias1_T, padding=1.0) * denominator)
            decay = 1 - options["lr"] * options["weight_decay"]
            block.write_weights(block.master * decay - options["lr"] * update)
            for kind, value in zip(self.state_kinds, (m, v, gradient), strict=True):
                block.write(kind, value)

    @staticmethod
    def _corrected(block: ShardBlock, options: Mapping[str, Any]) -> Tensor:
        """Gradient plus its change since the last step, weighted (equation 6 of the paper, approximate form)."""
        beta1, gradient = options["betas"][0], block.gradient()
        return gradient + (options["gamma"] * beta1 / (1 - beta1)) * (gradient - block.read("last_grad"))


class MARS(ShardableOptimizer):
    """MARS-AdamW in its approximate form, which takes the last step's gradient as it was.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the moments.
        gamma: weight of the change between gradients.
        vector_betas: decay rates of vectors, which AdamW updates.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardMARS

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        gamma: float = 0.025,
        vector_betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, (*betas, *vector_betas), gamma=gamma, eps=eps)
        options = {"lr": lr, "betas": betas, "gamma": gamma, "vector_betas": vector_betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "maximize": maximize, "state_dtype": state_dtype}
        super().__init__(params, options)
