"""Transports: how tokens reach the ranks of their experts, and how the experts' answers come back.

All-gather brings every token to every rank; all-to-all brings each token once to every rank that has one of its
experts. Hierarchical is all-to-all in two hops: once to every *node* that has one of its experts, between ranks of
equal place in their nodes, and there once to every rank that has one. The links between nodes then carry a token once a
node instead of once a rank, and a rank exchanges with nodes + ranks of a node others instead of all of the group.

Every rank takes part in every collective, in forward and in backward, whatever it has to send: a rank without tokens,
an expert without tokens, and one expert with all of them are ordinary cases.

An all-to-all can travel in parts (``in_chunks``): while the experts work on one, the next one is on its way, and so are
the answers to the one before; in the backward their gradients. Each part is a smaller product for every expert.

Shapes: T own tokens, P places in a group, K experts per token, D model width, S rows sent, R rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus.config.schema import ConfigError, TokenDispatcher
from megatron.optimus.moe.dispatch import Dispatcher, ExpertRows, LocalDispatcher
from megatron.optimus.ops import Routing
from megatron.optimus.parallel.collectives import (
    all_gather_rows,
    all_to_all_rows,
    exchange_row_counts,
    reduce_scatter_rows,
    start_all_to_all_rows,
)
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.parallel.placement import Ownership
from megatron.optimus.parallel.symmetric import SymmetricDispatcher


class AllGatherDispatcher:
    """All tokens to all ranks; each rank serves what its experts are asked for; reduce-scatter of partial sums.

    Regular traffic that needs no counts on the host: the transport of arXiv 2604.00785, Algorithm 1.
    """

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership, *, equal_tokens: bool = True) -> None:
        """``equal_tokens``: every rank always has the same number of tokens, so no counts are exchanged."""
        self.group = group
        self.rank = dist.get_rank(group) // ownership.num_shards
        self.ownership = ownership
        self.equal_tokens = equal_tokens

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows:
        counts = None if self.equal_tokens else exchange_row_counts(x_TD.shape[0], self.group, x_TD.device)
        x_RD = all_gather_rows(x_TD, self.group, counts)
        weights_RK = all_gather_rows(routing.weights_TK, self.group, counts)
        indices_RK = all_gather_rows(routing.indices_TK, self.group, counts)
        owner_E, local_E = self.ownership.tables(x_TD.device)
        indices_RK = torch.where(owner_E[indices_RK] == self.rank, local_E[indices_RK], -1)
        return ExpertRows(x_RD, weights_RK, indices_RK, counts)

    def combine(self, y_RD: Tensor, handle: list[int] | None) -> Tensor:
        return reduce_scatter_rows(y_RD, self.group, handle)


class _Outgoing(NamedTuple):
    """Rows in the order of the ranks they go to."""

    x_SD: Tensor
    weights_SK: Tensor
    indices_SK: Tensor
    row_S: Tensor  # own row of each
    num_rows: int
    count_P: Tensor


class _WayBack(NamedTuple):
    row_S: Tensor  # own row of each row sent
    num_rows: int
    send: list[int]
    receive: list[int]


class _Hop:
    """One all-to-all in which a row goes once to every place that one of its choices names, whatever their number.

    Needs the number of rows per rank on the host, one wait. ``num_shards`` consecutive ranks of the group are one place
    and get the same rows.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int = 1) -> None:
        self.group, self.num_shards = group, num_shards
        self.num_places = dist.get_world_size(group) // num_shards

    def send(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, place_TK: Tensor) -> ExpertRows:
        """``place_TK``: where each choice is served, -1 for one that is served by nobody here.

        The rows that arrive have the weights and indices of the choices served at their place, 0 and -1 for others.
        """
        rows = self.pack(x_TD, weights_TK, indices_TK, place_TK)
        [way] = self.agree([rows])
        x_RD, weights_RK, indices_RK = (all_to_all_rows(part, way.send, way.receive, self.group) for part in rows[:3])
        return ExpertRows(x_RD, weights_RK, indices_RK, way)

    def pack(self, x_TD: Tensor, weights_TK: Tensor, indices_TK: Tensor, place_TK: Tensor) -> _Outgoing:
        """What ``send`` is to send. Waits for the device."""
        needed_PT = torch.zeros(self.num_places + 1, len(x_TD), dtype=torch.bool, device=x_TD.device)
        needed_PT[place_TK.t(), torch.arange(len(x_TD), device=x_TD.device)] = True  # -1 is the last row, not a place
        needed_PT = needed_PT[:-1].repeat_interleave(self.num_shards, dim=0)
        rank_S, row_S = needed_PT.nonzero(as_tuple=True)
        here_SK = place_TK[row_S] == rank_S[:, None] // self.num_shards
        weights_SK = torch.where(here_SK, weights_TK[row_S], 0.0)
        indices_SK = torch.where(here_SK, indices_TK[row_S], -1)
        return _Outgoing(x_TD[row_S], weights_SK, indices_SK, row_S, len(x_TD), needed_PT.sum(dim=1))

    def agree(self, outgoing: Sequence[_Outgoing]) -> list[_WayBack]:
        """Tells each rank how many rows of each part it gets. Waits for the device once."""
        send_PC = torch.stack([rows.count_P for rows in outgoing], dim=1)
        receive_PC = torch.empty_like(send_PC)
        dist.all_to_all_single(receive_PC, send_PC, group=self.group)
        send_CP, receive_CP = torch.stack((send_PC, receive_PC)).mT.tolist()
        return [
            _WayBack(rows.row_S, rows.num_rows, send, receive)
            for rows, send, receive in zip(outgoing, send_CP, receive_CP, strict=True)
        ]

    def bring_back(self, y_RD: Tensor, handle: _WayBack) -> Tensor:
        """For each row that ``send`` got, the sum of what its copies have become."""
        return self.add_up(all_to_all_rows(y_RD, handle.receive, handle.send, self.group), handle)

    def add_up(self, y_SD: Tensor, handle: _WayBack) -> Tensor:
        """``bring_back`` for rows that are here again."""
        # fp32: partial sums of one token come back from several ranks and are rounded once.
        # index_put sorts where index_add would use atomics: the order of additions is the same in every run.
        y_TD = y_SD.new_zeros(handle.num_rows, y_SD.shape[1], dtype=torch.float32)
        return y_TD.index_put((handle.row_S,), y_SD.float(), accumulate=True).to(y_SD.dtype)


class AllToAllDispatcher:
    """Each token goes once to every rank that owns one of its experts, whatever the number of experts it uses there."""

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership) -> None:
        self.ownership = ownership
        self.hop = _Hop(group, ownership.num_shards)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows:
        owner_E, local_E = self.ownership.tables(x_TD.device)
        indices_TK = routing.indices_TK
        return self.hop.send(x_TD, routing.weights_TK, local_E[indices_TK], owner_E[indices_TK])

    def combine(self, y_RD: Tensor, handle: _WayBack) -> Tensor:
        return self.hop.bring_back(y_RD, handle)


@dataclass(frozen=True)
class InChunks:
    """``through_experts`` with an all-to-all that travels in parts, cut from every rank's own tokens."""

    num_chunks: int

    def __call__(
        self, dispatcher: Dispatcher, experts: nn.Module, x_TD: Tensor, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(dispatcher, AllToAllDispatcher)
        hop = dispatcher.hop
        owner_E, local_E = dispatcher.ownership.tables(x_TD.device)
        columns = (x_TD, routing.weights_TK, local_E[routing.indices_TK], owner_E[routing.indices_TK])
        chunks = zip(*(column.tensor_split(self.num_chunks) for column in columns), strict=True)
        outgoing = [hop.pack(*chunk) for chunk in chunks]
        ways = hop.agree(outgoing)
        there = [
            [start_all_to_all_rows(part, way.send, way.receive, hop.group) for part in rows[:3]]
            for rows, way in zip(outgoing, ways, strict=True)
        ]
        back, processed = [], torch.zeros((), dtype=torch.int64, device=x_TD.device)
        for travelling, way in zip(there, ways, strict=True):
            x_RD, weights_RK, indices_RK = (part.arrived() for part in travelling)
            y_RD = experts(x_RD, weights_RK, indices_RK)
            back.append(start_all_to_all_rows(y_RD, way.receive, way.send, hop.group))
            processed += (indices_RK >= 0).sum()
        return torch.cat([hop.add_up(y.arrived(), way) for y, way in zip(back, ways, strict=True)]), processed


class HierarchicalDispatcher:
    """Each token goes once to every node, and in it once to every rank, that owns one of its experts.

    ``within``: the ranks of this node; ``across``: those at the same place of all nodes, in order. Answers are summed
    on their way: over the ranks of a node where they leave it, over nodes at home, in fp32 each time.
    """

    def __init__(self, within: dist.ProcessGroup, across: dist.ProcessGroup, ownership: Ownership) -> None:
        self.ownership = ownership
        self.to_nodes, self.to_ranks = _Hop(across), _Hop(within, ownership.num_shards)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows:
        owner_E, local_E = self.ownership.tables(x_TD.device)
        places, indices_TK = self.to_ranks.num_places, routing.indices_TK
        nodes = self.to_nodes.send(x_TD, routing.weights_TK, indices_TK, owner_E[indices_TK] // places)
        is_here_RK = nodes.indices_RK >= 0
        indices_RK = nodes.indices_RK.clamp(min=0)
        place_RK = torch.where(is_here_RK, owner_E[indices_RK] % places, -1)
        ranks = self.to_ranks.send(nodes.x_RD, nodes.weights_RK, local_E[indices_RK], place_RK)
        return ranks._replace(handle=(nodes.handle, ranks.handle))

    def combine(self, y_RD: Tensor, handle: tuple[_WayBack, _WayBack]) -> Tensor:
        from_nodes, from_ranks = handle
        return self.to_nodes.bring_back(self.to_ranks.bring_back(y_RD, from_ranks), from_nodes)


def build_dispatcher(transport: TokenDispatcher, mesh: Mesh, ownership: Ownership) -> Dispatcher:
    """The transport over this rank's group of experts. Collective over it for the hierarchical one.

    Raises ConfigError where the hierarchical one does not fit the nodes, ValueError for "auto": ``settle_transport``
    (probe.py) makes a transport of it.
    """
    group = mesh.group("experts")
    if group is None:
        return LocalDispatcher()
    if transport is TokenDispatcher.ALLGATHER:
        return AllGatherDispatcher(group, ownership)
    if transport is TokenDispatcher.ALLTOALL:
        return AllToAllDispatcher(group, ownership)
    if transport is TokenDispatcher.SYMMETRIC:
        return SymmetricDispatcher(group, ownership)
    if transport is TokenDispatcher.AUTO:
        raise ValueError("moe_token_dispatcher_type=auto is no transport; call settle_transport first")
    problem = mesh.layout.hierarchy_problem(mesh.node_size)
    if problem is not None:
        raise ConfigError(problem)
    within, across = mesh.node_groups("experts")
    assert within is not None and across is not None  # hierarchy_problem: two or more of both
    return HierarchicalDispatcher(within, across, ownership)
