"""Which rank of an expert-parallel group owns which expert: read by slicing, dispatch and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.optimus.config.placement import LayerPlacement, from_json, regular_placement
from megatron.optimus.config.schema import ConfigError, ExpertPlacement
from megatron.optimus.context import RunContext


@dataclass(frozen=True)
class Ownership:
    """The experts of one layer over the ranks of an expert-parallel group.

    Attributes:
        experts_of_ranks: for each rank the numbers of its experts in the model, in local order.
        num_shards: ranks over which each expert is split (``expert_tensor_parallel_size``); the shards of a rank's
            experts are on neighbouring ranks.
    """

    experts_of_ranks: LayerPlacement
    num_shards: int = 1

    @classmethod
    def from_placement(
        cls, num_experts: int, num_ranks: int, placement: ExpertPlacement, num_shards: int = 1
    ) -> Ownership:
        """The ownership that ``moe_expert_placement`` names."""
        return cls(regular_placement(num_experts, num_ranks, placement), num_shards)

    @property
    def num_ranks(self) -> int:
        """Ranks over which whole experts are spread."""
        return len(self.experts_of_ranks)

    @property
    def num_experts(self) -> int:
        """Routed experts of the layer, over all ranks."""
        return sum(map(len, self.experts_of_ranks))

    def expert_ids(self, rank: int) -> tuple[int, ...]:
        """Numbers in the model of the experts of a rank (of ``num_ranks``), in local order."""
        return self.experts_of_ranks[rank]

    @cache  # noqa: B019 - a process has a handful of ownerships, asked in every layer and step
    def owner_and_local_id(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each expert of the model, the rank that owns it and its number there; two int64 [E]."""
        owner_E = torch.empty(self.num_experts, dtype=torch.int64)
        local_E = torch.empty(self.num_experts, dtype=torch.int64)
        for rank in range(self.num_ranks):
            ids = torch.tensor(self.expert_ids(rank), dtype=torch.int64)
            owner_E[ids] = rank
            local_E[ids] = torch.arange(len(ids))
        return owner_E.to(device), local_E.to(device)

    @cache  # noqa: B019 - as above
    def local_ids(self, rank: int, device: torch.device) -> Tensor:
        """For each expert of the model, its number on ``rank`` (of ``num_ranks``) or -1; int32 [E]."""
        owner_E, local_E = self.owner_and_local_id(device)
        return torch.where(owner_E == rank, local_E, -1).to(torch.int32)


def read_placements(run: RunContext) -> tuple[LayerPlacement, ...] | None:
    """Reads ``moe_expert_placement_file`` on rank 0 and sends it to all ranks. Collective.

    Returns:
        The placement of each MoE layer; None without a file.

    Raises:
        ConfigError: on every rank, where the file cannot be read or is not of this model over these ranks.
    """
    config, ranks = run.config, run.ranks
    path = config.parallel.moe_expert_placement_file
    if path is None:
        return None
    sizes = dict(
        num_layers=len(config.model.moe_layers), num_experts=config.model.num_experts, num_ranks=run.mesh.size("ep")
    )

    def read() -> bytes:
        if run.mesh.rank > 0:
            return b""
        data = Path(path).read_bytes()
        from_json(data.decode(), path, **sizes)
        return data

    data = ranks.run_on_all_ranks(read, f"reading moe_expert_placement_file={path}", ConfigError)
    return from_json(ranks.broadcast_bytes(data).decode(), path, **sizes)
