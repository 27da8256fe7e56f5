"""Which rule runs a torch optimizer's parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.adamw import ShardAdam
from deepspeed_ext.optimizers.base import ShardableOptimizer, ShardOptimizer
from deepspeed_ext.optimizers.muon import ShardMuon
from deepspeed_ext.optimizers.sgd import ShardSGD
from deepspeed_ext.optimizers.wrapped import WrappedOptimizer


def shard_optimizer_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> ShardOptimizer:
    """The rule for one of ``optimizer``'s param_groups; use the same object for ``new_state`` and ``update_``.

    Optimizers of this package name their own. torch's AdamW, Adam, SGD and Muon (not their subclasses, which may
    compute something else) have fused updates. Any other is taken for element-wise and run as it is, see
    WrappedOptimizer, which raises ValueError where that would be wrong.
    """
    if isinstance(optimizer, ShardableOptimizer):
        return optimizer.shard_optimizer(group)
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        return ShardAdam()
    if kind is torch.optim.SGD:
        return ShardSGD(group["momentum"])
    if kind is torch.optim.Muon:
        return ShardMuon()
    return WrappedOptimizer(optimizer, group)
