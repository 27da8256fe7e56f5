"""Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv 2405.15682): an average of the weights instead of a decay.

Three points: z takes the steps, x is the average of all z, and gradients are taken at y between the two. The masters
are x, so checkpoints, exports and evaluations have the average; the model is trained with y, which is computed from x
and z and never stored in fp32. So switching from one to the other and back changes no bit.

The weights of the average are the squares of the warm-up's factors (the reference's defaults), whose sum has a closed
form: there is no number besides x, z and the moments that a checkpoint would have to hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer
from deepspeed_ext.optimizers.blocks import BlockOptimizer, ShardBlock, bias_correction, check_options, wide_dtype


def warmup_and_weight(step: Tensor, warmup_iters: int) -> tuple[Tensor, Tensor]:
    """Computes the factor on the learning rate, and the weight of the new z in the average.

    Args:
        step: number of the step, 0-dim, 1 for the first.
        warmup_iters: steps over which the rate grows linearly.

    Returns:
        Both 0-dim fp32: s(t) = min(1, t / warmup) and s(t)^2 / sum of s(i)^2 for i up to t.
    """
    t, length = step.to(wide_dtype(step.device)), max(1, warmup_iters)
    factor, early = (t / length).clamp(max=1.0), t.clamp(max=length)
    total = early * (early + 1) * (2 * early + 1) / (6 * length**2) + (t - length).clamp(min=0)
    return factor.float(), (factor.square() / total).float()


class _ShardScheduleFree(BlockOptimizer):
    """What both have in common: x in the masters, z as a state, y in the parameters."""

    weight_kinds = ("z",)

    def new_state(self, shard: Shard, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ShardOptimizer.new_state; z begins at the weights. Raises ValueError for states below fp32."""
        if options.get("state_dtype", "fp32") != "fp32":
            raise ValueError(
                f"state_dtype={options['state_dtype']!r}: schedule-free optimizers keep z, which is weights"
            )
        return {**super().new_state(shard, options), "z": shard.master.clone()}

    def write_training_point(self, shard: Shard, options: Mapping[str, Any]) -> None:
        """Writes y into the parameters."""
        shard.param.copy_(torch.lerp(shard.master, shard.state["z"], 1 - _beta(options)))

    def update_block(self, block: ShardBlock, options: Mapping[str, Any]) -> None:
        """See BlockOptimizer.update_block."""
        factor, weight = warmup_and_weight(block.scalars.step, options["warmup_iters"])
        x, z, mix = block.master, block.read("z"), 1 - _beta(options)
        y = torch.lerp(x, z, mix)
        z = z - options["lr"] * factor * (self.direction(block, options) + options["weight_decay"] * y)
        x = x + weight * (z - x)
        block.write("z", z)
        block.write_weights(x, torch.lerp(x, z, mix))

    def direction(self, block: ShardBlock, options: Mapping[str, Any]) -> Tensor:
        """Returns the step of z at learning rate 1, without weight decay."""
        return block.gradient()


def _beta(options: Mapping[str, Any]) -> float:
    return options["betas"][0] if "betas" in options else options["momentum"]


class ShardScheduleFreeSGD(_ShardScheduleFree):
    """Options of a parameter group: lr, momentum, warmup_iters, weight_decay, maximize."""

    state_kinds = ("z",)


class ShardScheduleFreeAdamW(_ShardScheduleFree):
    """Options of a parameter group: lr, betas, warmup_iters, eps, weight_decay, maximize."""

    state_kinds = ("exp_avg_sq", "z")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def direction(self, block: ShardBlock, options: Mapping[str, Any]) -> Tensor:
        """Returns the gradient divided by the root of the second moment."""
        beta2, gradient = options["betas"][1], block.gradient()
        v = beta2 * block.read("exp_avg_sq") + (1 - beta2) * gradient.square()
        block.write("exp_avg_sq", v)
        return gradient / ((v / bias_correction(beta2, block.scalars.step)).sqrt() + options["eps"])


class ScheduleFreeSGD(ShardableOptimizer):
    """Schedule-Free SGD. The learning rate is constant after its own warm-up; schedulers are not for it.

    The parameters are y. Used alone, ``state[param]["master"]`` is x, the weights to evaluate and to keep; with
    ``deepspeed_ext.initialize`` they are in the parameters inside ``engine.optimizer.averaged_parameters()``.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate, larger than that of SGD with a schedule.
        momentum: share of x in y.
        warmup_iters: steps over which the rate grows linearly.
        weight_decay: added to the step, at y.
        maximize: ascend instead of descend.
        state_dtype: "fp32".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardScheduleFreeSGD

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        warmup_iters: int = 0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, (momentum,), warmup_iters=warmup_iters)
        options = {"lr": lr, "momentum": momentum, "warmup_iters": warmup_iters, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})


class ScheduleFreeAdamW(ShardableOptimizer):
    """Schedule-Free AdamW. As ScheduleFreeSGD, with steps divided by the root of the second moment.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate, 1 to 10 times that of AdamW with a schedule.
        betas: share of x in y, and decay rate of the second moment.
        warmup_iters: steps over which the rate grows linearly.
        eps: added to the root of the second moment.
        weight_decay: added to the step, at y.
        maximize: ascend instead of descend.
        state_dtype: "fp32".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardScheduleFreeAdamW

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_iters: int = 0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
    ) -> None:
        check_options(lr, weight_decay, betas, warmup_iters=warmup_iters, eps=eps)
        options = {"lr": lr, "betas": betas, "warmup_iters": warmup_iters, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize, "state_dtype": state_dtype})
