"""apex's FusedAdam on shards: the same states as AdamW's, so checkpoints fit either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.wrapped import WrappedOptimizer


class ShardFusedAdam(WrappedOptimizer):
    """Runs apex.optimizers.FusedAdam on the master weights. It reads the step's scalars on the host.

    It is not tried on a small matrix as other libraries' optimizers are: it runs on CUDA tensors only.

    Raises:
        ValueError: ``state_dtype`` is not "fp32".
    """

    state_kinds = ("exp_avg", "exp_avg_sq")

    def _check(self, group: Mapping[str, Any]) -> None:
        """Nothing to try."""


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is apex's FusedAdam; DeepSpeed has one of that name too."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and kind.__module__.partition(".")[0] == "apex"
