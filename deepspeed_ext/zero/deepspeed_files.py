"""What DeepSpeed's engine calls for its own checkpoint files, which load only at the layout that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_ext.groups import world_group
from deepspeed_ext.zero import checkpoint
from deepspeed_ext.zero.agreement import together

if TYPE_CHECKING:
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer


class DeepSpeedFiles:
    """A part of EPZeroOptimizer."""

    @property
    def _whole(self) -> EPZeroOptimizer:
        return cast("EPZeroOptimizer", self)

    @property
    def round_robin_bit16_groups(self) -> list[list[nn.Parameter]]:
        """The engine records parameter shapes from here."""
        return self._whole.bit16_groups

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards and their layout. Raises RuntimeError while states are on the host."""
        optimizer = self._whole
        optimizer.require_on_device("state_dict", "hp_params", "lp_params", "optim_states")
        optimizer.wait_for_params()
        return checkpoint.state_dict(optimizer)

    @torch.no_grad()
    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **engine_options: Any
    ) -> None:
        """Restores what ``state_dict`` of the same rank and layout returned, and publishes the parameters. Collective.

        ``state_dict_list`` has one entry per dense rank; only this rank's is read. Raises ValueError, on every rank and
        before anything has changed, if any was written at another layout or by DeepSpeed's own optimizer, RuntimeError
        while states are on the host.
        """
        optimizer = self._whole
        optimizer.require_on_device("load_state_dict")
        own = state_dict_list[dist.get_rank(optimizer.groups.dense)]
        together(lambda: checkpoint.check_state_dict(optimizer, own), world_group())
        optimizer.wait_for_params()  # in fp32 they are the masters
        checkpoint.load_state_dict(optimizer, own, load_optimizer_states)
        optimizer.sync_params_from_master()

    def _restore_from_bit16_weights(self) -> None:
        self.refresh_fp32_params()

    def refresh_fp32_params(self) -> None:
        """Sets the masters from the parameters, after the module's weights were loaded without optimizer state.
        Collective. Raises ValueError, on every rank, if ranks hold different experts: DeepSpeed's module file holds
        those of one rank only.
        """
        optimizer = self._whole
        optimizer.require_on_device("refresh_fp32_params", "hp_params", "lp_params")
        together(self._refuse_spread_experts, world_group())  # a pipeline stage may have none
        optimizer.wait_for_params()
        for family in optimizer.families:
            family.read_masters_from_params()

    def _refuse_spread_experts(self) -> None:
        optimizer = self._whole
        for family in optimizer.families:
            name = family.key.expert_group
            if name is not None and family.group_size < dist.get_world_size(optimizer.groups.dense):
                raise ValueError(
                    f"DeepSpeed's module file holds only one rank's experts of group {name!r}; load the optimizer "
                    "states too (load_optimizer_states=True), or use an expert-parallel checkpoint format"
                )

    def update_lp_params(self) -> None:
        """DeepSpeed's name for ``sync_params_from_master``."""
        self._whole.sync_params_from_master()
