"""Expert parallelism: which rank owns which expert, and the two transports that bring tokens there.

Every rank of an expert-parallel group has tokens of its own (experts cost no extra batch replication). A rank without
tokens, an expert without tokens, and one expert with all of them are ordinary cases: the collectives run regardless,
in forward and in backward, so no rank waits for another that had nothing to do.

An expert may also be split along its inner width over the ranks of an expert-tensor-parallel group ("shards"): each of
them sees all the expert's tokens and gives a part of their outputs, and the sum that puts a token's experts together
puts the parts together as well. A group of dispatch is therefore all ranks that hold each expert once, shards included.

Gradients: a rank's loss reaches the experts of every rank of its group, so an expert's gradient already is the sum over
the group's losses. It is summed over the expert's replicas later and divided by the whole data-parallel size, as every
other gradient is.

Shapes: T own tokens, P ranks of a group of dispatch, K experts per token, D model width, E experts of the layer,
R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimus.config.schema import ExpertPlacement, LoadBalancing, ParallelConfig, TokenDispatcher
from megatron.optimus.models.partition import split_parameter
from megatron.optimus.moe.dispatch import Dispatcher, ExpertRows, LocalDispatcher
from megatron.optimus.moe.layer import MoE
from megatron.optimus.moe.router import RouterStats
from megatron.optimus.ops import Routing
from megatron.optimus.parallel.collectives import (
    all_gather_rows,
    all_to_all_rows,
    exchange_row_counts,
    reduce_scatter_rows,
)
from megatron.optimus.parallel.mesh import Mesh


@dataclass(frozen=True)
class Ownership:
    """Which rank of the expert-parallel group holds which expert; slicing and dispatch both ask here."""

    num_experts: int
    num_ranks: int  # over which whole experts are spread
    placement: ExpertPlacement
    num_shards: int = 1  # over which one expert is split; shards of a rank's experts are neighbours

    def expert_ids(self, rank: int) -> tuple[int, ...]:
        """Global numbers of the experts of a rank (of ``num_ranks``), in local order."""
        per_rank = self.num_experts // self.num_ranks
        if self.placement is ExpertPlacement.CONTIGUOUS:
            return tuple(range(rank * per_rank, (rank + 1) * per_rank))
        return tuple(range(rank, self.num_experts, self.num_ranks))

    @cache  # noqa: B019 - a handful of ownerships per process, asked in every layer and step
    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each global expert: the rank that owns it and its number there; two int64 [E]."""
        owner_E = torch.empty(self.num_experts, dtype=torch.int64)
        local_E = torch.empty(self.num_experts, dtype=torch.int64)
        for rank in range(self.num_ranks):
            ids = torch.tensor(self.expert_ids(rank), dtype=torch.int64)
            owner_E[ids] = rank
            local_E[ids] = torch.arange(len(ids))
        return owner_E.to(device), local_E.to(device)


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


class _AllToAllHandle(NamedTuple):
    token_S: Tensor  # own token of each row sent
    num_tokens: int
    send: list[int]
    receive: list[int]


class AllToAllDispatcher:
    """Each token goes once to every rank that owns one of its experts, whatever the number of experts it uses there.

    Needs the number of rows per rank on the host, one wait per layer; moves the least data.
    """

    def __init__(self, group: dist.ProcessGroup, ownership: Ownership) -> None:
        self.group = group
        self.ownership = ownership

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows:
        owner_E, local_E = self.ownership.tables(x_TD.device)
        owner_TK, local_TK = owner_E[routing.indices_TK], local_E[routing.indices_TK]
        needed_PT = torch.zeros(self.ownership.num_ranks, x_TD.shape[0], dtype=torch.bool, device=x_TD.device)
        needed_PT[owner_TK.t(), torch.arange(x_TD.shape[0], device=x_TD.device)] = True
        num_shards = self.ownership.num_shards
        needed_PT = needed_PT.repeat_interleave(num_shards, dim=0)
        rank_S, token_S = needed_PT.nonzero(as_tuple=True)
        send, receive = self._exchange_counts(needed_PT.sum(dim=1))
        here_SK = owner_TK[token_S] == rank_S[:, None] // num_shards
        weights_SK = torch.where(here_SK, routing.weights_TK[token_S], 0.0)
        indices_SK = torch.where(here_SK, local_TK[token_S], -1)
        return ExpertRows(
            x_RD=all_to_all_rows(x_TD[token_S], send, receive, self.group),
            weights_RK=all_to_all_rows(weights_SK, send, receive, self.group),
            indices_RK=all_to_all_rows(indices_SK, send, receive, self.group),
            handle=_AllToAllHandle(token_S, x_TD.shape[0], send, receive),
        )

    def combine(self, y_RD: Tensor, handle: _AllToAllHandle) -> Tensor:
        y_SD = all_to_all_rows(y_RD, handle.receive, handle.send, self.group)
        # fp32: partial sums of one token come back from several ranks and are rounded once.
        # index_put sorts where index_add would use atomics: the order of additions is the same in every run.
        y_TD = y_SD.new_zeros(handle.num_tokens, y_SD.shape[1], dtype=torch.float32)
        return y_TD.index_put((handle.token_S,), y_SD.float(), accumulate=True).to(y_SD.dtype)

    def _exchange_counts(self, send_P: Tensor) -> tuple[list[int], list[int]]:
        receive_P = torch.empty_like(send_P)
        dist.all_to_all_single(receive_P, send_P, group=self.group)
        send, receive = torch.stack((send_P, receive_P)).tolist()
        return send, receive


def build_dispatcher(config: ParallelConfig, group: dist.ProcessGroup | None, ownership: Ownership) -> Dispatcher:
    if group is None:
        return LocalDispatcher()
    if config.moe_token_dispatcher_type is TokenDispatcher.ALLGATHER:
        return AllGatherDispatcher(group, ownership)
    return AllToAllDispatcher(group, ownership)


def apply_expert_parallelism(layer: MoE, config: ParallelConfig, mesh: Mesh) -> None:
    """Keeps this rank's experts of a layer, or its part of them, and connects it to the others.

    Expert weights get DeepSpeed's marks (``allreduce``, ``group_name``) and ``expert_ids``, the global number of each
    row of dim 0, from which checkpoints and the initialisation derive what a row is; split ones those of partition.py.
    """
    num_shards, shard = mesh.size("etp"), mesh.index("etp")
    num_experts = layer.experts.gate_up_weight.shape[0]
    ownership = Ownership(num_experts, mesh.size("ep"), config.moe_expert_placement, num_shards)
    expert_ids = ownership.expert_ids(mesh.index("ep"))
    for name, weight in list(layer.experts.named_parameters()):
        local = nn.Parameter(weight.detach()[list(expert_ids)].clone())
        if num_shards > 1:  # along the inner width, which holds gate and up in the first weight
            dim, stride = (1, 2) if name == "gate_up_weight" else (2, 1)
            local = split_parameter(local, dim, shard, num_shards, stride=stride, whole=weight.shape, rows=expert_ids)
        if mesh.size("tp") > 1:  # tensor-parallel ranks have different experts, or replicas whose states are split
            local.tensor_model_parallel = True  # type: ignore[attr-defined]
        local.expert_ids = expert_ids  # type: ignore[attr-defined]
        local.allreduce = False  # type: ignore[attr-defined]
        local.group_name = f"ep_size_{ownership.num_ranks}"  # type: ignore[attr-defined]
        setattr(layer.experts, name, local)
    layer.dispatcher = build_dispatcher(config, mesh.group("experts"), ownership)
    if shard > 0:
        layer.register_forward_hook(_count_no_rows)
    is_global = layer.router.balancing is LoadBalancing.GLOBAL_AUX_LOSS
    layer.router.balance_group = mesh.group("stage" if is_global else "sequence")


def _count_no_rows(layer: nn.Module, args: Any, output: tuple[Tensor, RouterStats]) -> tuple[Tensor, RouterStats]:
    """The shards of an expert work on the same rows; the first of them counts."""
    y, stats = output
    return y, stats._replace(processed=torch.zeros_like(stats.processed))
