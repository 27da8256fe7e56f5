"""Cautious AdamW (Liang et al. 2024, arXiv 2411.16085): AdamW that leaves out what points against the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import ShardBlock, bias_correction, check_options
from deepspeed_ext.optimizers.whole_tensors import Rounds, TensorOptimizer, WholeTensors


class ShardCautiousAdamW(TensorOptimizer):
    """Options of a parameter group: lr, betas, eps, weight_decay (decoupled), maximize, state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_tensors_(
        self, shards: Sequence[Shard], tensors: WholeTensors, options: Mapping[str, Any], scalars: StepScalars
    ) -> Rounds:
        """See TensorOptimizer.update_tensors_. What is kept is scaled up by the share that a tensor keeps."""
        beta1, beta2 = options["betas"]
        own = tensors.zeros()
        for block in tensors.blocks(shards, self.state_kinds, scalars, options["maximize"]):
            m, gradient = self._momentum(block, beta1)
            block.sum_into(own, (m * gradient > 0).float())
        kept = yield own
        scale_T = tensors.numels_T / (kept + 1)
        for block in tensors.blocks(shards, self.state_kinds, scalars, options["maximize"]):
            m, gradient = self._momentum(block, beta1)
            v = beta2 * block.read("exp_avg_sq") + (1 - beta2) * gradient.square()
            mask = (m * gradient > 0) * block.spread(scale_T)
            denominator = v.sqrt() / bias_correction(beta2, scalars.step).sqrt() + options["eps"]
            update = mask * m / bias_correction(beta1, scalars.step) / denominator
            decay = 1 - options["lr"] * options["weight_decay"]
            block.write_weights(block.master * decay - options["lr"] * update)
            block.write("exp_avg", m)
            block.write("exp_avg_sq", v)

    @staticmethod
    def _momentum(block: ShardBlock, beta1: float) -> tuple[Tensor, Tensor]:
        gradient = block.gradient()
        return torch.lerp(block.read("exp_avg"), gradient, 1 - beta1), gradient


class CautiousAdamW(ShardableOptimizer):
    """AdamW whose update is masked where its sign differs from the gradient's, and scaled by n / (kept + 1).

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardCautiousAdamW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, eps=eps)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})
