"""SGD with momentum, Nesterov or not: the rule behind torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.optimizers.base import Shard, ShardOptimizer, StepScalars
from deepspeed_ext.optimizers.kernels import kernels_for
from deepspeed_ext.optimizers.kernels.options import SgdOptions


class ShardSGD(ShardOptimizer):
    """Options of a group: lr, momentum, dampening, nesterov, weight_decay, maximize, state_dtype, and one that torch's
    SGD does not know: decoupled_weight_decay (default False: the decay is added to the gradient).

    Keeps "momentum_buffer" only if momentum is above 0, which must not change later.
    """

    def __init__(self, momentum: float) -> None:
        self.state_kinds = ("momentum_buffer",) if momentum else ()

    def update_(self, shard: Shard, options: Mapping[str, Any], scalars: StepScalars) -> None:
        """See ShardOptimizer.update_."""
        kernels_for(shard.master.device.type).sgd(shard, SgdOptions.of(options), scalars)
