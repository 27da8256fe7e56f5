"""AdamW and Adam: the rule behind torch.optim.AdamW and torch.optim.Adam (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.base import Shard, ShardOptimizer, StepScalars
from deepspeed_ext.optimizers.kernels import kernels_for
from deepspeed_ext.optimizers.kernels.options import AdamOptions


class ShardAdam(ShardOptimizer):
    """Options of a group: lr, betas, eps, weight_decay, decoupled_weight_decay (True: AdamW), maximize, state_dtype."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    unsigned_kinds = frozenset({"exp_avg_sq"})

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        kernels_for(shard.master.device.type).adam(shard, AdamOptions.of(options), scalars)
