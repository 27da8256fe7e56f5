"""Which rule runs a torch optimizer's parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.optimizers.adamw import AdamRule
from deepspeed_ext.optimizers.base import RuleOptimizer, UpdateRule
from deepspeed_ext.optimizers.muon import MuonRule
from deepspeed_ext.optimizers.sgd import SgdRule
from deepspeed_ext.optimizers.wrapped import WrappedRule


def rule_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> UpdateRule:
    """The rule for one of ``optimizer``'s param_groups; use the same object for ``new_state`` and ``update_``.

    Optimizers of this package name their own. torch's AdamW, Adam, SGD and Muon (not their subclasses, which may
    compute something else) have fused rules. Any other is taken for element-wise and run as it is, see WrappedRule,
    which raises ValueError where that would be wrong.
    """
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.update_rule(group)
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        return AdamRule()
    if kind is torch.optim.SGD:
        return SgdRule(group["momentum"])
    if kind is torch.optim.Muon:
        return MuonRule()
    return WrappedRule(optimizer, group)
