"""The element-wise updates on the CPU: the reference's, and for AdamW with fp32 states torch's fused kernel.

One cache-sized block follows the other, so the bf16 parameter is rounded while the new master is still in the cache.
This runs at the machine's copy bandwidth; a C++ kernel of our own measured no faster.
"""

from __future__ import annotations

import torch

from deepspeed_ext.optimizers.base import Shard, StepScalars
from deepspeed_ext.optimizers.blocks import blocks_of
from deepspeed_ext.optimizers.kernels import reference
from deepspeed_ext.optimizers.kernels.options import AdamOptions
from deepspeed_ext.optimizers.kernels.reference import apply_update, lion, momentum, sgd

__all__ = ["adam", "apply_update", "lion", "momentum", "sgd"]


def adam(shard: Shard, options: AdamOptions, scalars: StepScalars) -> None:
    """See reference.adam."""
    if not shard.state["exp_avg"].dtype == shard.state["exp_avg_sq"].dtype == torch.float32:
        reference.adam(shard, options, scalars)
        return
    fused = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    for block in blocks_of(shard, ("exp_avg", "exp_avg_sq"), scalars):
        own = block.shard
        fused(
            [own.master],
            [block.gradient()],
            [own.state["exp_avg"]],
            [own.state["exp_avg_sq"]],
            [],
            [scalars.step],
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            weight_decay=options.weight_decay,
            eps=options.eps,
            amsgrad=False,
            maximize=options.maximize,
        )
        if own.param.data_ptr() != own.master.data_ptr():
            own.param.copy_(own.master)
