"""One family's flat buffers on one rank, and the three things done with them: accumulate, reduce, publish.

Sizes, with P parameters in the family over n ranks: flat_param P (the model's dtype; the module's parameters are views
of it), main_grad P fp32, grad_shard P/n fp32 (none extra for n = 1), master P/n fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_ext.groups import ranks_of
from deepspeed_ext.zero.collectives import all_gather, reduce_scatter
from deepspeed_ext.zero.partition import FlatLayout, shard_pieces

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class FamilyKey:
    """What the parameters of one flat buffer have in common."""

    param_group: int  # index in the wrapped optimizer's param_groups
    expert_group: str | None  # None: dense
    dtype: torch.dtype


class Family:
    """Flat buffers of one family. ``params`` and ``layout.placements`` are in the same order."""

    def __init__(
        self, key: FamilyKey, params: Sequence[nn.Parameter], layout: FlatLayout, group: dist.ProcessGroup | None
    ) -> None:
        self.key = key
        self.group = group
        self.layout = layout
        self.params = dict(zip((placement.name for placement in layout.placements), params, strict=True))
        rank = ranks_of(group).index(dist.get_rank())
        self.pieces = shard_pieces(layout, rank)
        self._own = slice(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
        device = params[0].device
        self.flat_param = torch.zeros(layout.numel, dtype=key.dtype, device=device)
        self._move_params_into_buffer()
        self.main_grad = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        if layout.group_size == 1:
            self.grad_shard = self.main_grad
        else:
            self.grad_shard = torch.empty(layout.shard_numel, dtype=torch.float32, device=device)
        self.master = torch.empty(layout.shard_numel, dtype=torch.float32, device=device)
        self.read_master_from_params()
        self.master.grad = self.grad_shard

    @torch.no_grad()
    def _move_params_into_buffer(self) -> None:
        for placement in self.layout.placements:
            param = self.params[placement.name]
            view = self.flat_param[placement.offset : placement.offset + placement.numel].view(param.shape)
            view.copy_(param)
            param.data = view

    def grad_views(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter with its fp32 accumulation buffer, of the parameter's shape."""
        views = []
        for placement in self.layout.placements:
            param = self.params[placement.name]
            views.append(
                (param, self.main_grad[placement.offset : placement.offset + placement.numel].view(param.shape))
            )
        return views

    def start_reduce(self) -> dist.Work | None:
        """Starts summing main_grad over the group into grad_shard; None if there is nothing to communicate."""
        if self.layout.group_size == 1:
            return None
        return reduce_scatter(self.grad_shard, self.main_grad, group=self.group, async_op=True)

    @torch.no_grad()
    def read_master_from_params(self) -> None:
        """Sets the master shard to the parameters' present values."""
        self.master.copy_(self.flat_param[self._own])

    @torch.no_grad()
    def start_publish(self) -> dist.Work | None:
        """Casts the master shard into this rank's part of the parameters and starts gathering the other parts."""
        own = self.flat_param[self._own]
        own.copy_(self.master)
        if self.layout.group_size == 1:
            return None
        return all_gather(self.flat_param, own, group=self.group, async_op=True)
