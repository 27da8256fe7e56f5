"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): AdamW with a second momentum that remembers for thousands of
steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import ShardableOptimizer
from deepspeed_ext.optimizers.blocks import BlockOptimizer, ShardBlock, bias_correction, check_options, wide_dtype


def slow_rates(options: Mapping[str, Any], step: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Computes alpha and beta3 of a step: with ``warmup_iters`` they grow, beta3 linearly in its half-life."""
    (beta1, _, beta3), alpha, warmup = options["betas"], options["alpha"], options["warmup_iters"]
    if not warmup:
        return alpha, beta3
    part = (step.to(wide_dtype(step.device)) / warmup).clamp(max=1.0)
    log1, log3 = math.log(beta1), math.log(beta3)
    grown = torch.exp(log1 * log3 / ((1 - part) * log3 + part * log1)).clamp(max=beta3)
    return (part * alpha).float(), grown.float()


class ShardAdEMAMix(BlockOptimizer):
    """Options of a parameter group: lr, betas (three), alpha, warmup_iters, eps, weight_decay (decoupled), maximize,
    state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq", "exp_avg_slow")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_block(self, block: ShardBlock, options: Mapping[str, Any]) -> None:
        """See BlockOptimizer.update_block."""
        (beta1, beta2, _), lr, step = options["betas"], options["lr"], block.scalars.step
        alpha, beta3 = slow_rates(options, step)
        gradient = block.gradient()
        m = torch.lerp(block.read("exp_avg"), gradient, 1 - beta1)
        v = beta2 * block.read("exp_avg_sq") + (1 - beta2) * gradient.square()
        old = block.read("exp_avg_slow")
        slow = old + (1 - beta3) * (gradient - old)
        denominator = v.sqrt() / bias_correction(beta2, step).sqrt() + options["eps"]
        update = (m / bias_correction(beta1, step) + alpha * slow) / denominator
        block.write_weights(block.master * (1 - lr * options["weight_decay"]) - lr * update)
        block.write("exp_avg", m)
        block.write("exp_avg_sq", v)
        block.write("exp_avg_slow", slow)


class AdEMAMix(ShardableOptimizer):
    """AdEMAMix, algorithm 1 of the paper.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the fast momentum, the second moment and the slow momentum.
        alpha: weight of the slow momentum beside the fast one.
        warmup_iters: steps over which alpha and the slow decay rate grow; 0: none. The paper takes the whole run.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardAdEMAMix

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        warmup_iters: int = 0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, alpha=alpha, warmup_iters=warmup_iters, eps=eps)
        if warmup_iters and not 0 < betas[0] < betas[2]:
            raise ValueError(f"warmup_iters={warmup_iters} needs betas with 0 < first < third, got {tuple(betas)}")
        options = {"lr": lr, "betas": betas, "alpha": alpha, "warmup_iters": warmup_iters, "eps": eps}
        options |= {"weight_decay": weight_decay, "maximize": maximize, "state_dtype": state_dtype}
        super().__init__(params, options)
