"""Which rule runs a torch optimizer's parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.rules.adamw import AdamRule
from deepspeed_ext.rules.base import RuleOptimizer, UpdateRule


def rule_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """The rule for one of ``optimizer``'s param_groups.

    Optimizers of this package name their own; torch's AdamW, Adam and SGD have fused ones; any other is taken for
    element-wise and run as it is on fp32 masters, with the host reading the step's scalars. Raises ValueError for
    optimizers known not to be element-wise.
    """
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.update_rule(group)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and not group["amsgrad"]:
        return AdamRule()
    raise ValueError(f"{type(optimizer).__name__} has no update rule")
