"""Which rank of an expert-parallel group owns which expert; slicing, dispatch and checkpoints all ask here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron.optimus.config.schema import ExpertPlacement


@dataclass(frozen=True)
class Ownership:
    """The experts of one layer over the ranks of an expert-parallel group."""

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
