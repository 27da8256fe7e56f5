"""The all-to-all token dispatchers: each token goes once to every rank that has one of its experts.

``AllToAllDispatcher`` does it in one hop, and can cut a rank's tokens into chunks: while the experts compute one, the
next chunk's tokens and the previous chunk's outputs travel, in the backward their gradients. Each chunk is a smaller
product for every expert.

``HierarchicalDispatcher`` does it in two hops: once to every node that has one of the experts, between ranks of equal
index in their nodes, and from there once to every rank that has one. The links between nodes then carry a token once a
node instead of once a rank.

Every rank takes part in every collective, in forward and backward, whatever it has to send: a rank without tokens, an
expert without tokens, and one expert with all of them are ordinary cases.

Shapes: T own tokens, P destinations of a hop, C chunks, K experts per token, D model width, R rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import ParallelConfig, TokenDispatcherType
from megatron.optimus.moe.dispatch.base import ExpertRows, OverlappedWork, TokenDispatcher, no_work, register
from megatron.optimus.moe.dispatch.overlap import (
    WEIGHTS,
    AsyncDispatch,
    Wait,
    X,
    begin_dispatch,
    expert_numbers,
    finish_dispatch,
    pack_choices,
    rows_for,
)
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.collectives import (
    AsyncCollective,
    all_to_all_rows,
    start_all_to_all,
    start_all_to_all_rows,
)
from megatron.optimus.platform.mesh import Mesh


class _ExchangePlan(NamedTuple):
    """Order of the rows sent, and how many rows travel between the ranks of a hop.

    Attributes:
        positions_TP: int32, index of the copy of a row for each destination among the rows sent, which are in the
            order of destinations, then of rows; -1 where a destination does not need the row.
        input_splits: rows sent to each rank.
        output_splits: rows received from each rank.
    """

    positions_TP: Tensor
    input_splits: list[int]
    output_splits: list[int]


class _Hop:
    """One all-to-all in which a row goes once to each destination that its choices name, however many name it.

    ``num_shards`` consecutive ranks of the group are one destination and get the same rows.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int = 1) -> None:
        self.group, self.num_shards = group, num_shards
        self.num_destinations = dist.get_world_size(group) // num_shards
        self.index = dist.get_rank(group) // num_shards  # of this rank among the destinations

    def plan(self, destinations_C: Sequence[Tensor]) -> list[_ExchangePlan]:
        """Plans of the chunks of rows. Waits once for the device and for the other ranks, whatever their number.

        Args:
            destinations_C: for each chunk int64 [T, K], the destination of each choice; -1: none.
        """
        needed = [self._needed(destination_TK) for destination_TK in destinations_C]
        send_PC = torch.stack([needed_PT.sum(dim=1) for needed_PT in needed], dim=1)
        receive_PC = torch.empty_like(send_PC)
        exchange = dist.all_to_all_single(receive_PC, send_PC, group=self.group, async_op=True)
        positions = [_positions(needed_PT) for needed_PT in needed]  # while the counts travel
        exchange.wait()
        send_CP, receive_CP = (counts_PC.T.tolist() for counts_PC in devices.AsyncHostCopy(send_PC, receive_PC).read())
        return [_ExchangePlan(*plan) for plan in zip(positions, send_CP, receive_CP, strict=True)]

    def _needed(self, destination_TK: Tensor) -> Tensor:
        """Which rank needs which row: bool [P, T]."""
        destinations_P = torch.arange(self.num_destinations, dtype=destination_TK.dtype, device=destination_TK.device)
        needed_PT = (destination_TK.t() == destinations_P[:, None, None]).any(dim=1)
        return needed_PT if self.num_shards == 1 else needed_PT.repeat_interleave(self.num_shards, dim=0)

    def start_dispatch(
        self, x_TD: Tensor, choices_T2K: Tensor, plan: _ExchangePlan
    ) -> tuple[AsyncCollective, AsyncCollective]:
        """Starts to send rows and their packed choices, outside autograd."""
        splits, num_sent = (plan.input_splits, plan.output_splits), sum(plan.input_splits)
        # The rows take longest, so they leave before the choices are copied into their order.
        x, choices = (
            start_all_to_all(ops.copy_rows(part, plan.positions_TP, num_sent), *splits, self.group)
            for part in (x_TD.detach(), choices_T2K)
        )
        return x, choices

    def dispatch(
        self, x_TD: Tensor, choices_T2K: Tensor, destination_TK: Tensor
    ) -> tuple[Tensor, Tensor, _ExchangePlan]:
        """Rows and packed choices received from all ranks, and the plan of the exchange; outside autograd."""
        [plan] = self.plan([destination_TK])
        x, choices = self.start_dispatch(x_TD, choices_T2K, plan)
        return x.wait(), choices.wait(), plan

    def start_combine(self, y_RD: Tensor, plan: _ExchangePlan) -> Wait:
        """Starts ``combine``, outside autograd."""
        y = start_all_to_all(y_RD, plan.output_splits, plan.input_splits, self.group)
        return lambda: ops.sum_copies(y.wait(), plan.positions_TP)

    def combine(self, y_RD: Tensor, plan: _ExchangePlan) -> Tensor:
        """For each row that ``dispatch`` was given, the sum of the outputs for its copies, rounded once: [T, D]."""
        copies = all_to_all_rows(y_RD, plan.output_splits, plan.input_splits, self.group)
        return ops.sum_copies(copies, plan.positions_TP)


def _positions(needed_PT: Tensor) -> Tensor:
    """``_ExchangePlan.positions_TP`` of the rows that each rank needs."""
    end_PT = needed_PT.view(-1).cumsum(0, dtype=torch.int32).view(needed_PT.shape)
    return torch.where(needed_PT, end_PT - 1, -1).t().contiguous()


class _AsyncAllToAll(AsyncDispatch):
    """The exchange of all tokens, or of a chunk of them."""

    def __init__(self, hop: _Hop, plan: _ExchangePlan) -> None:
        super().__init__()
        self.hop, self.plan = hop, plan

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        dweights, dx = (self.hop.start_combine(rows, self.plan) for rows in (dweights_RK, dx_RD))
        return dx, dweights


class _StartedAllToAll(NamedTuple):
    """Tokens under way. ``pending`` must not hold this tuple: it would keep the tokens and, by the links, itself."""

    pending: _AsyncAllToAll
    links: tuple[Tensor, Tensor]
    x: AsyncCollective
    choices: AsyncCollective

    @classmethod
    def begin(
        cls, hop: _Hop, plan: _ExchangePlan, x_TD: Tensor, weights_TK: Tensor, choices_T2K: Tensor
    ) -> _StartedAllToAll:
        pending = _AsyncAllToAll(hop, plan)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(weights_TK, pending, WEIGHTS)
        return cls(pending, links, *hop.start_dispatch(x_TD, choices_T2K, plan))


@register(TokenDispatcherType.ALLTOALL)
class AllToAllDispatcher(TokenDispatcher):
    """Sends each token once to every rank that owns one of its experts; the host waits once for the row counts."""

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership, num_chunks: int = 1) -> None:
        """Makes the dispatcher of one layer.

        Args:
            group: the ranks that together hold every expert once.
            ownership: which of them has which expert.
            num_chunks: chunks into which ``run_experts`` cuts every rank's tokens.
        """
        self.ownership, self.num_chunks = ownership, num_chunks
        self.hop = _Hop(group, ownership.num_shards)

    @classmethod
    def build(cls, config: ParallelConfig, mesh: Mesh, ownership: Ownership) -> AllToAllDispatcher:
        group = mesh.group("experts")
        assert group is not None
        return cls(group, ownership, config.moe_dispatch_chunks)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        [plan] = self.hop.plan([self._owners(routing.indices_TK)])
        exchange = _StartedAllToAll.begin(self.hop, plan, x_TD, routing.weights_TK, pack_choices(routing))
        overlapped()
        return self._finish(exchange)

    def combine(self, y_RD: Tensor, handle: _ExchangePlan) -> Tensor:
        return self.hop.combine(y_RD, handle)

    def run_experts(
        self, experts: nn.Module, x_TD: Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork
    ) -> tuple[Tensor, Tensor | int]:
        if self.num_chunks == 1:
            return super().run_experts(experts, x_TD, routing, in_flight, overlapped)
        columns = (x_TD, routing.weights_TK, pack_choices(routing), self._owners(routing.indices_TK))
        *chunks_C, owners_C = (column.tensor_split(self.num_chunks) for column in columns)
        plans = self.hop.plan(owners_C)
        exchanges = [
            _StartedAllToAll.begin(self.hop, plan, *chunk) for plan, *chunk in zip(plans, *chunks_C, strict=True)
        ]
        overlapped()
        outputs, processed = [], torch.zeros((), dtype=torch.int64, device=x_TD.device)
        for exchange, plan in zip(exchanges, plans, strict=True):
            rows = self._finish(exchange)
            y_RD = experts(rows.x_RD, rows.weights_RK, rows.indices_RK, rows.on_input_gradients)
            outputs.append(start_all_to_all_rows(y_RD, plan.output_splits, plan.input_splits, self.hop.group))
            processed += (rows.indices_RK >= 0).sum()
        parts = [ops.sum_copies(y.wait(), plan.positions_TP) for y, plan in zip(outputs, plans, strict=True)]
        return torch.cat(parts), processed

    def _owners(self, indices_TK: Tensor) -> Tensor:
        """The rank (of ``ownership.num_ranks``) that serves each choice."""
        return self.ownership.owner_and_local_id(indices_TK.device)[0][indices_TK]

    def _finish(self, in_flight: _StartedAllToAll) -> ExpertRows:
        pending, links, x, choices = in_flight
        rows = rows_for(self.ownership, self.hop.index, x.wait(), choices.wait(), pending.plan)
        return finish_dispatch(links, pending, rows)


class _AsyncHierarchical(AsyncDispatch):
    def __init__(self, dispatcher: HierarchicalDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.plans: tuple[_ExchangePlan, _ExchangePlan] | None = None  # known when the second hop begins

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        assert self.plans is not None
        plans = self.plans

        def both_hops() -> list[Tensor]:
            return [self.dispatcher.combine(rows, plans) for rows in (dx_RD, dweights_RK)]

        # On a stream of its own: the second hop sends what the first has received, so it must wait there.
        end = devices.on_side_stream(dx_RD.device, both_hops)
        return lambda: end()[X], lambda: end()[WEIGHTS]


@register(TokenDispatcherType.HIERARCHICAL)
class HierarchicalDispatcher(TokenDispatcher):
    """Sends each token once to every node that owns one of its experts, and in it once to every rank that does.

    Outputs are summed on the way: over the ranks of a node before they leave it, over nodes on the rank of the token,
    in fp32 each time.
    """

    runs_everywhere = False

    def __init__(self, within: dist.ProcessGroup, across: dist.ProcessGroup, ownership: Ownership) -> None:
        """Makes the dispatcher of one layer.

        Args:
            within: the ranks of this node.
            across: the ranks of equal index in their nodes, in the order of nodes.
            ownership: which rank of all of them has which expert.
        """
        self.ownership = ownership
        self.to_nodes, self.to_ranks = _Hop(across), _Hop(within, ownership.num_shards)
        self.rank = self.to_nodes.index * self.to_ranks.num_destinations + self.to_ranks.index

    @classmethod
    def unsupported_reason(cls, mesh: Mesh, device: torch.device) -> str | None:
        sizes = torch.tensor([mesh.node_size, -mesh.node_size], device=device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=mesh.group("world"))
        largest, smallest = sizes[0].item(), -sizes[1].item()
        if largest != smallest:  # ranks would not agree on who is in which node
            return (
                f"nodes have from {smallest} to {largest} ranks; start as many on each, set "
                "moe_hierarchical_node_size to a number that divides them, or use alltoall"
            )
        problem = mesh.layout.hierarchy_problem(mesh.node_size)
        return None if problem is None else problem.removeprefix("moe_token_dispatcher_type=hierarchical ")

    @classmethod
    def build(cls, config: ParallelConfig, mesh: Mesh, ownership: Ownership) -> HierarchicalDispatcher:
        within, across = mesh.node_groups("experts")
        assert within is not None and across is not None  # unsupported_reason: two or more ranks in both
        return cls(within, across, ownership)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, in_flight: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        owner_E = self.ownership.owner_and_local_id(x_TD.device)[0]
        ranks_of_node = self.to_ranks.num_destinations
        node_TK = (owner_E // ranks_of_node)[routing.indices_TK]
        [from_nodes] = self.to_nodes.plan([node_TK])
        pending = _AsyncHierarchical(self)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        exchange = self.to_nodes.start_dispatch(x_TD, pack_choices(routing), from_nodes)
        overlapped()  # beside the longer of the two hops
        x_RD, choices_R2K = (end.wait() for end in exchange)
        is_here_E = owner_E // ranks_of_node == self.to_nodes.index
        rank_RK = torch.where(is_here_E, owner_E % ranks_of_node, -1)[expert_numbers(choices_R2K)]
        x_RD, choices_R2K, from_ranks = self.to_ranks.dispatch(x_RD, choices_R2K, rank_RK)
        pending.plans = from_nodes, from_ranks
        rows = rows_for(self.ownership, self.rank, x_RD, choices_R2K, pending.plans)
        return finish_dispatch(links, pending, rows)

    def combine(self, y_RD: Tensor, handle: tuple[_ExchangePlan, _ExchangePlan]) -> Tensor:
        from_nodes, from_ranks = handle
        return self.to_nodes.combine(self.to_ranks.combine(y_RD, from_ranks), from_nodes)
