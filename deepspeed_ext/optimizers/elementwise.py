"""Optimizers whose update of an element depends on that element alone: Adam, AdamW, SGD and Lion.

Each class names its options and its kernel. The arithmetic is in kernels/reference.py; the other modules of kernels/
compute the same in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from deepspeed_ext.optimizers.base import Shard, ShardableOptimizer, ShardOptimizer, StepScalars
from deepspeed_ext.optimizers.blocks import check_options
from deepspeed_ext.optimizers.kernels import kernels_for
from deepspeed_ext.optimizers.kernels.options import AdamOptions, KernelOptions, LionOptions, SGDOptions

_LATE_STEP = 1 << 22  # betas up to 0.999995 to this power are nothing beside 1; fp32 counts on from it by ones


class ElementwiseOptimizer(ShardOptimizer):
    """Updates a shard by one fused kernel.

    Class attributes:
        KERNEL: name of the function in every module of kernels/.
        OPTIONS: the hyperparameters that this function takes.
    """

    KERNEL: ClassVar[str]
    OPTIONS: ClassVar[type[KernelOptions]]

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        kernel = getattr(kernels_for(shard.master.device.type), self.KERNEL)
        kernel(shard, self.OPTIONS.from_group(options), scalars)


class ShardAdam(ElementwiseOptimizer):
    """Runs torch.optim.AdamW and torch.optim.Adam (Loshchilov and Hutter 2019).

    Options of a parameter group: lr, betas, eps, weight_decay, decoupled_weight_decay (True by default: AdamW),
    maximize, state_dtype, and bias_correction (True by default), which torch's do not have.
    """

    KERNEL, OPTIONS = "adam", AdamOptions
    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        if not options.get("bias_correction", True):
            # So late a step that both corrections are 1; steps stay distinct, on which the rounding of states depends.
            scalars = replace(scalars, step=scalars.step + _LATE_STEP)
        super().update_(shard, options, scalars)


class ShardSGD(ElementwiseOptimizer):
    """Runs torch.optim.SGD, with or without momentum.

    Options of a parameter group: lr, momentum, dampening, nesterov, weight_decay, maximize, state_dtype, and one that
    torch.optim.SGD does not have: decoupled_weight_decay (False by default: the decay is added to the gradient).
    """

    KERNEL, OPTIONS = "sgd", SGDOptions

    def __init__(self, momentum: float) -> None:
        """Keeps the state "momentum_buffer" if ``momentum`` is above 0; this must not change during training."""
        self.state_kinds = ("momentum_buffer",) if momentum else ()


class ShardLion(ElementwiseOptimizer):
    """Runs Lion. Options of a parameter group: lr, betas, weight_decay (decoupled), maximize, state_dtype."""

    KERNEL, OPTIONS = "lion", LionOptions
    state_kinds = ("exp_avg",)


class Lion(ShardableOptimizer):
    """Lion: steps by the sign of an interpolation between momentum and gradient, with decoupled weight decay.

    It keeps one moment where Adam keeps two. The paper uses a learning rate 3 to 10 times below AdamW's, and a weight
    decay larger by the same factor. Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
    algorithm 2.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate, at least 0.
        betas: weights of the momentum in the update and in the new momentum, in [0, 1).
        weight_decay: decoupled, at least 0.
        maximize: ascend instead of descend.
        state_dtype: "fp32", "bf16" or "int8".

    Raises:
        ValueError: an option is out of range.
    """

    rule = ShardLion

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
        check_options(lr, weight_decay, betas)
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "state_dtype": state_dtype})
