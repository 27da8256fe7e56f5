"""Transports: how tokens reach the ranks of their experts, and how the experts' outputs come back.

All-gather brings every token to every rank; all-to-all brings each token once to every rank that has one of its
experts. Hierarchical is all-to-all in two hops: once to every *node* that has one of its experts, between ranks of
equal place in their nodes, and there once to every rank that has one. The links between nodes then carry a token once a
node instead of once a rank, and a rank exchanges with nodes + ranks of a node others instead of all of the group.

Every rank takes part in every collective, in forward and in backward, whatever it has to send: a rank without tokens,
an expert without tokens, and one expert with all of them are ordinary cases.

A token takes its choices along as they are, weights and global expert numbers in one message; whoever receives it picks
those that it serves. The gradients of a token and of its weights, zero for choices served elsewhere, are then both the
sum over its copies. They are combined beside the last product of the experts' backward, on CUDA after
it (async_dispatch.py).

An all-to-all can travel in parts (``ChunkedExpertPass``): while the experts work on one, the next one is on its way,
and so are the outputs of the one before; in the backward their gradients. Each part is a smaller product for every
expert.

Shapes: T own tokens, P places in a group, K experts per token, D model width, S rows sent, R rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.config.schema import ConfigError, TokenDispatcherType
from megatron.optimus.moe.dispatch.base import ExpertRows, LocalDispatcher, OverlappedWork, TokenDispatcher, no_work
from megatron.optimus.moe.dispatch.overlap import WEIGHTS, AsyncDispatch, Wait, X, begin_dispatch, finish_dispatch
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.moe.dispatch.symmetric import SymmetricDispatcher
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.collectives import (
    Started,
    all_to_all_rows,
    exchange_row_counts,
    reduce_scatter_rows,
    start_all_gather,
    start_all_to_all,
    start_all_to_all_rows,
    start_reduce_scatter,
)
from megatron.optimus.platform.mesh import Mesh


def pack_choices(routing: Routing) -> Tensor:
    """Weights and expert numbers of each token side by side: fp32 [T, 2K].

    The numbers are int32 in the bits of fp32, so the result is for moving and copying only.
    """
    return torch.cat((routing.weights_TK.detach(), routing.indices_TK.to(torch.int32).view(torch.float32)), dim=1)


def expert_numbers(choices_R2K: Tensor) -> Tensor:
    """The global expert numbers of what ``pack_choices`` made: int32 [R, K]."""
    return choices_R2K[:, choices_R2K.shape[1] // 2 :].view(torch.int32)


def rows_for(ownership: Ownership, rank: int, x_RD: Tensor, choices_R2K: Tensor, handle: object) -> ExpertRows:
    """What has arrived, as the experts of ``rank`` (of ``ownership.num_ranks``) see it."""
    topk = choices_R2K.shape[1] // 2
    indices_RK = ownership.numbers_on(rank, x_RD.device)[expert_numbers(choices_R2K)]
    return ExpertRows(x_RD, choices_R2K[:, :topk].contiguous(), indices_RK, handle)


class _AsyncAllGather(AsyncDispatch):
    def __init__(self, group: dist.ProcessGroup, counts: list[int] | None) -> None:
        super().__init__()
        self.group, self.counts = group, counts

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        dweights, dx = (start_reduce_scatter(rows, self.group, self.counts) for rows in (dweights_RK, dx_RD))
        return dx.wait, dweights.wait


class _StartedAllGather(NamedTuple):
    """Tokens that were sent. ``pending`` does not hold this: it would keep them, and through the link itself, alive."""

    pending: _AsyncAllGather
    link: Tensor
    x: Started


class AllGatherDispatcher:
    """All tokens to all ranks; each rank serves what its experts are asked for; reduce-scatter of partial sums.

    Regular traffic that needs no counts on the host: the transport of arXiv 2604.00785, Algorithm 1. Nor does it need
    choices, so tokens leave before the router, which on CUDA waits for them.
    """

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership, *, equal_tokens: bool = True) -> None:
        """``equal_tokens``: every rank always has the same number of tokens, so no counts are exchanged."""
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
        self, x_TD: Tensor, routing: Routing, started: _StartedAllGather, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        pending, link, x = started
        links = link, begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        choices = start_all_gather(pack_choices(routing), self.group, pending.counts)
        overlapped()
        rows = rows_for(self.ownership, self.rank, x.wait(), choices.wait(), pending.counts)
        return finish_dispatch(links, pending, rows)

    def combine(self, y_RD: Tensor, handle: list[int] | None) -> Tensor:
        return reduce_scatter_rows(y_RD, self.group, handle)


class _ExchangePlan(NamedTuple):
    """Where the copies of own rows go, and how many rows travel between the ranks of the hop."""

    positions_TP: Tensor  # of each row's copies among the rows sent, which are in the order of ranks, then of own rows
    input_splits: list[int]
    output_splits: list[int]


class _Hop:
    """One all-to-all in which a row goes once to every place that one of its choices names, whatever their number.

    Needs the number of rows per rank on the host, one wait. ``num_shards`` consecutive ranks of the group are one place
    and get the same rows.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int = 1) -> None:
        self.group, self.num_shards = group, num_shards
        self.num_places = dist.get_world_size(group) // num_shards
        self.place = dist.get_rank(group) // num_shards

    def plan(self, parts: Sequence[Tensor]) -> list[_ExchangePlan]:
        """The plans of rows that travel together. Waits for the device once, and for the other ranks.

        ``parts``: for each part of the rows, where their choices are served, [T, K]; -1: by nobody here.
        """
        needed = [self._needed(place_TK) for place_TK in parts]
        send_PC = torch.stack([needed_PT.sum(dim=1) for needed_PT in needed], dim=1)
        receive_PC = torch.empty_like(send_PC)
        exchange = dist.all_to_all_single(receive_PC, send_PC, group=self.group, async_op=True)
        positions = [_positions(needed_PT) for needed_PT in needed]  # while the counts travel
        exchange.wait()
        send_CP, receive_CP = (counts_PC.T.tolist() for counts_PC in devices.HostCopy(send_PC, receive_PC).read())
        return [_ExchangePlan(*plan) for plan in zip(positions, send_CP, receive_CP, strict=True)]

    def _needed(self, place_TK: Tensor) -> Tensor:
        """Which rank needs which row: bool [P, T]."""
        places_P = torch.arange(self.num_places, dtype=place_TK.dtype, device=place_TK.device)
        needed_PT = (place_TK.t() == places_P[:, None, None]).any(dim=1)
        return needed_PT if self.num_shards == 1 else needed_PT.repeat_interleave(self.num_shards, dim=0)

    def start_dispatch(self, x_TD: Tensor, choices_T2K: Tensor, plan: _ExchangePlan) -> tuple[Started, Started]:
        """Sends rows and their choices, outside autograd. The rows, which take longest, start before the
        choices are packed."""
        splits, num_sent = (plan.input_splits, plan.output_splits), sum(plan.input_splits)
        x, choices = (
            start_all_to_all(ops.copy_rows(part, plan.positions_TP, num_sent), *splits, self.group)
            for part in (x_TD.detach(), choices_T2K)
        )
        return x, choices

    def dispatch(self, x_TD: Tensor, choices_T2K: Tensor, place_TK: Tensor) -> tuple[Tensor, Tensor, _ExchangePlan]:
        """Rows that arrive from all ranks, their choices, and how they came. Outside autograd."""
        [plan] = self.plan([place_TK])
        x, choices = self.start_dispatch(x_TD, choices_T2K, plan)
        return x.wait(), choices.wait(), plan

    def start_combine(self, y_RD: Tensor, plan: _ExchangePlan) -> Wait:
        """``combine`` started, outside autograd."""
        y = start_all_to_all(y_RD, plan.output_splits, plan.input_splits, self.group)
        return lambda: ops.sum_copies(y.wait(), plan.positions_TP)

    def combine(self, y_RD: Tensor, plan: _ExchangePlan) -> Tensor:
        """For each row that ``dispatch`` got, the sum of what its copies have become, rounded once."""
        copies = all_to_all_rows(y_RD, plan.output_splits, plan.input_splits, self.group)
        return ops.sum_copies(copies, plan.positions_TP)


def _positions(needed_PT: Tensor) -> Tensor:
    """Of each row for each rank, in the order of ranks and then of rows; -1 where it is not needed: int32 [T, P]."""
    end_PT = needed_PT.view(-1).cumsum(0, dtype=torch.int32).view(needed_PT.shape)
    return torch.where(needed_PT, end_PT - 1, -1).t().contiguous()


class _AsyncAllToAll(AsyncDispatch):
    """Tokens, or a part of them, by all-to-all."""

    def __init__(self, hop: _Hop, plan: _ExchangePlan) -> None:
        super().__init__()
        self.hop, self.plan = hop, plan

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        dweights, dx = (self.hop.start_combine(rows, self.plan) for rows in (dweights_RK, dx_RD))
        return dx, dweights


class _StartedAllToAll(NamedTuple):
    """As ``_StartedAllGather``."""

    pending: _AsyncAllToAll
    links: tuple[Tensor, Tensor]
    x: Started
    choices: Started

    @classmethod
    def begin(
        cls, hop: _Hop, plan: _ExchangePlan, x_TD: Tensor, weights_TK: Tensor, choices_T2K: Tensor
    ) -> _StartedAllToAll:
        pending = _AsyncAllToAll(hop, plan)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(weights_TK, pending, WEIGHTS)
        return cls(pending, links, *hop.start_dispatch(x_TD, choices_T2K, plan))


class AllToAllDispatcher:
    """Each token goes once to every rank that owns one of its experts, whatever the number of experts it uses there."""

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership) -> None:
        self.ownership = ownership
        self.hop = _Hop(group, ownership.num_shards)

    def start(self, x_TD: Tensor) -> None:
        return None

    def places(self, indices_TK: Tensor) -> Tensor:
        return self.ownership.tables(indices_TK.device)[0][indices_TK]

    def finish(self, started: _StartedAllToAll) -> ExpertRows:
        pending, links, x, choices = started
        rows = rows_for(self.ownership, self.hop.place, x.wait(), choices.wait(), pending.plan)
        return finish_dispatch(links, pending, rows)

    def dispatch(
        self, x_TD: Tensor, routing: Routing, started: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        [plan] = self.hop.plan([self.places(routing.indices_TK)])
        exchange = _StartedAllToAll.begin(self.hop, plan, x_TD, routing.weights_TK, pack_choices(routing))
        overlapped()
        return self.finish(exchange)

    def combine(self, y_RD: Tensor, handle: _ExchangePlan) -> Tensor:
        return self.hop.combine(y_RD, handle)


@dataclass(frozen=True)
class ChunkedExpertPass:
    """``expert_pass`` with an all-to-all that travels in parts, cut from every rank's own tokens."""

    num_chunks: int

    def __call__(
        self,
        dispatcher: TokenDispatcher,
        experts: nn.Module,
        x_TD: Tensor,
        routing: Routing,
        started: None,
        overlapped: OverlappedWork,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(dispatcher, AllToAllDispatcher)
        hop = dispatcher.hop
        columns = (x_TD, routing.weights_TK, pack_choices(routing), dispatcher.places(routing.indices_TK))
        *parts_C, places_C = (column.tensor_split(self.num_chunks) for column in columns)
        plans = hop.plan(places_C)
        exchanges = [_StartedAllToAll.begin(hop, plan, *part) for plan, *part in zip(plans, *parts_C, strict=True)]
        overlapped()
        outputs, processed = [], torch.zeros((), dtype=torch.int64, device=x_TD.device)
        for exchange, plan in zip(exchanges, plans, strict=True):
            rows = dispatcher.finish(exchange)
            y_RD = experts(rows.x_RD, rows.weights_RK, rows.indices_RK, rows.on_input_gradients)
            outputs.append(start_all_to_all_rows(y_RD, plan.output_splits, plan.input_splits, hop.group))
            processed += (rows.indices_RK >= 0).sum()
        parts = [ops.sum_copies(y.wait(), plan.positions_TP) for y, plan in zip(outputs, plans, strict=True)]
        return torch.cat(parts), processed


class _AsyncHierarchical(AsyncDispatch):
    def __init__(self, dispatcher: HierarchicalDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.plans: tuple[_ExchangePlan, _ExchangePlan] | None = None  # known when the second hop begins

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        assert self.plans is not None
        plans = self.plans

        def both() -> list[Tensor]:
            return [self.dispatcher.combine(rows, plans) for rows in (dx_RD, dweights_RK)]

        end = devices.on_side_stream(
            dx_RD.device, both
        )  # the second hop sends what the first has brought: it must wait there
        return lambda: end()[X], lambda: end()[WEIGHTS]


class HierarchicalDispatcher:
    """Each token goes once to every node, and in it once to every rank, that owns one of its experts.

    ``within``: the ranks of this node; ``across``: those at the same place of all nodes, in order. Outputs are summed
    on the way: over the ranks of a node where they leave it, over nodes on the rank of the token, in fp32 each time.
    """

    def __init__(self, within: dist.ProcessGroup, across: dist.ProcessGroup, ownership: Ownership) -> None:
        self.ownership = ownership
        self.to_nodes, self.to_ranks = _Hop(across), _Hop(within, ownership.num_shards)
        self.rank = self.to_nodes.place * self.to_ranks.num_places + self.to_ranks.place

    def start(self, x_TD: Tensor) -> None:
        return None

    def dispatch(
        self, x_TD: Tensor, routing: Routing, started: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        owner_E = self.ownership.tables(x_TD.device)[0]
        places = self.to_ranks.num_places
        node_TK = (owner_E // places)[routing.indices_TK]
        [from_nodes] = self.to_nodes.plan([node_TK])
        pending = _AsyncHierarchical(self)
        links = begin_dispatch(x_TD, pending, X), begin_dispatch(routing.weights_TK, pending, WEIGHTS)
        exchange = self.to_nodes.start_dispatch(x_TD, pack_choices(routing), from_nodes)
        overlapped()  # beside the longer of the two hops
        x_RD, choices_R2K = (end.wait() for end in exchange)
        is_here_E = owner_E // places == self.to_nodes.place
        place_RK = torch.where(is_here_E, owner_E % places, -1)[expert_numbers(choices_R2K)]
        x_RD, choices_R2K, from_ranks = self.to_ranks.dispatch(x_RD, choices_R2K, place_RK)
        pending.plans = from_nodes, from_ranks
        rows = rows_for(self.ownership, self.rank, x_RD, choices_R2K, pending.plans)
        return finish_dispatch(links, pending, rows)

    def combine(self, y_RD: Tensor, handle: tuple[_ExchangePlan, _ExchangePlan]) -> Tensor:
        from_nodes, from_ranks = handle
        return self.to_nodes.combine(self.to_ranks.combine(y_RD, from_ranks), from_nodes)


def build_dispatcher(transport: TokenDispatcherType, mesh: Mesh, ownership: Ownership) -> TokenDispatcher:
    """The transport over this rank's group of experts. Collective over it for the hierarchical one.

    Raises ConfigError where the hierarchical one does not fit the nodes, ValueError for "auto": ``select_dispatcher``
    (probe.py) makes a transport of it.
    """
    group = mesh.group("experts")
    if group is None:
        return LocalDispatcher()
    if transport is TokenDispatcherType.ALLGATHER:
        return AllGatherDispatcher(group, ownership)
    if transport is TokenDispatcherType.ALLTOALL:
        return AllToAllDispatcher(group, ownership)
    if transport is TokenDispatcherType.SYMMETRIC:
        return SymmetricDispatcher(group, ownership)
    if transport is TokenDispatcherType.AUTO:
        raise ValueError("moe_token_dispatcher_type=auto is no transport; call select_dispatcher first")
    problem = mesh.layout.hierarchy_problem(mesh.node_size)
    if problem is not None:
        raise ConfigError(problem)
    within, across = mesh.node_groups("experts")
    assert within is not None and across is not None  # hierarchy_problem: two or more of both
    return HierarchicalDispatcher(within, across, ownership)
