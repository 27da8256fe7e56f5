"""The object that runs each torch optimizer on shards, and the errors of those that cannot run there."""

from __future__ import annotations

import torch

from deepspeed_ext.optimizers import Muon, shard_optimizer_for
from deepspeed_ext.optimizers.elementwise import ShardAdam, ShardSGD
from deepspeed_ext.optimizers.muon import ShardMuon
from deepspeed_ext.optimizers.wrapped import WrappedOptimizer


def test_each_optimizer_finds_its_shard_optimizer() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 4))

    class Own(torch.optim.AdamW):
        """May compute anything, so it runs itself."""

    for kind, expected in (
        (torch.optim.AdamW, ShardAdam),
        (torch.optim.Adam, ShardAdam),
        (torch.optim.SGD, ShardSGD),
        (getattr(torch.optim, "Muon", Muon), ShardMuon),  # torch has it from 2.9 on
        (Muon, ShardMuon),
        (Own, WrappedOptimizer),
        (torch.optim.Adagrad, WrappedOptimizer),
    ):
        optimizer = kind([param], lr=0.1)
        assert type(shard_optimizer_for(optimizer, optimizer.param_groups[0])) is expected
