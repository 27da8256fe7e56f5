"""DeepSpeed's engine with our optimizer: two overrides choose it, one broadcasts weights over our groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_ext.groups import ZeroGroups, expert_group_name, ranks_of
from deepspeed_ext.zero.optimizer import EPZeroOptimizer


class EPEngineMixin:
    """Put before a DeepSpeed engine class; needs ``zero_groups`` and a ZeRO stage 1 configuration.

    DeepSpeed learns nothing of the experts (has_moe_layers stays False for MoE classes that are not its own): its norm,
    reduction and checkpoint code for them is bypassed, ours works from the parameters' marks.
    """

    zero_groups: ZeroGroups

    def __init__(self, *args: Any, zero_groups: ZeroGroups, **kwargs: Any) -> None:
        # DeepSpeed's constructor builds the optimizer, and nn.Module's forbids ordinary assignment before it has run.
        self.__dict__["zero_groups"] = zero_groups
        super().__init__(*args, **kwargs)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        # Stock code would send bf16 with fp32 accumulation to BF16_Optimizer and refuse optimizers it has not tested.
        return "zero_optimization"

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> EPZeroOptimizer:
        return EPZeroOptimizer(
            optimizer,
            self.param_names,  # type: ignore[attr-defined]
            groups=self.zero_groups,
            max_norm=self.gradient_clipping(),  # type: ignore[attr-defined]
            average=self.gradient_average,  # type: ignore[attr-defined]
        )

    @torch.no_grad()
    def _broadcast_model(self) -> None:
        """Gives every rank of a group the weights of the group's first rank."""
        for param in self.module.parameters():  # type: ignore[attr-defined]
            group = self.zero_groups.of(expert_group_name(param))
            if len(ranks_of(group)) > 1:
                weight = param.data.contiguous()
                dist.broadcast(weight, group=group, group_src=0)
                param.data.copy_(weight)


class EPEngine(EPEngineMixin, DeepSpeedEngine):
    """DeepSpeedEngine with the EP-aware ZeRO-1 optimizer; build it through ``deepspeed_ext.initialize``."""
