"""The all-gather token dispatcher: every token goes to every rank, and outputs are reduce-scattered.

Every rank takes part in every collective, in forward and backward, whatever it has to send: a rank without tokens, an
expert without tokens, and one expert with all of them are ordinary cases.

Shapes: T own tokens, R rows of all ranks, K experts per token, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron.optimus.config.schema import TokenDispatcherType
from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, TokenDispatcher, no_work, register
from megatron.optimus.moe.dispatch.overlap import (
    WEIGHTS,
    AsyncDispatch,
    Wait,
    X,
    begin_dispatch,
    finish_dispatch,
    pack_choices,
    rows_for,
)
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.collectives import (
    AsyncCollective,
    exchange_row_counts,
    reduce_scatter_rows,
    start_all_gather,
    start_reduce_scatter,
)


class _AsyncAllGather(AsyncDispatch):
    def __init__(self, group: dist.ProcessGroup, counts: list[int] | None) -> None:
        super().__init__()
        self.group, self.counts = group, counts

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        dweights, dx = (start_reduce_scatter(rows, self.group, self.counts) for rows in (dweights_RK, dx_RD))
        return dx.wait, dweights.wait


class _StartedAllGather(NamedTuple):
    """Tokens under way. ``pending`` must not hold this tuple: it would keep the tokens and, by the link, itself."""

    pending: _AsyncAllGather
    link: Tensor
    x: AsyncCollective


@register(TokenDispatcherType.ALLGATHER)
class AllGatherDispatcher(TokenDispatcher):
    """Regular traffic that needs no row counts on the host (arXiv 2604.00785, Algorithm 1).

    It does not need the router's choices either, so tokens leave before the router runs, which on CUDA waits for them.
    """

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership, *, equal_tokens: bool = True) -> None:
        """Makes the dispatcher of one layer.

        Args:
            group: the ranks that together hold every expert once.
            ownership: which of them has which expert.
            equal_tokens: every rank always has the same number of tokens, so no counts are exchanged.
        """
        self.group = group
        self.rank = dist.get_rank(group) // ownership.num_shards
        self.ownership = ownership
        self.equal_tokens = equal_tokens

    def start(self, x_TD: Tensor) -> _StartedAllGather:
        counts = None if self.equal_tokens else exchange_row_counts(x_TD.shape[0], self.group, x_TD.device)
        pending = _AsyncAllGather(self.group, counts)
        x = start_all_gather(x_TD.detach(), self.group, counts)
        if not devices.overlaps_collectives(x_TD.device):
            x.wait()
        return _StartedAllGather(pending, begin_dispatch(x_TD, pending, X), x)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: _StartedAllGather, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        pending, link, x = in_flight
        links = link, begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        choices = start_all_gather(pack_choices(routing), self.group, pending.counts)
        overlapped()
        rows = rows_for(self.ownership, self.rank, x.wait(), choices.wait(), pending.counts)
        return finish_dispatch(links, pending, rows)

    def combine(self, y_RD: Tensor, handle: list[int] | None) -> Tensor:
        return reduce_scatter_rows(y_RD, self.group, handle)
