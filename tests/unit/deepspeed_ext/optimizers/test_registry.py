"""The object that runs each torch optimizer on shards, and the errors of those that cannot run there."""

from __future__ import annotations

import pytest
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
    for kind, message in (
        (torch.optim.LBFGS, "LBFGS needs whole tensors"),
        (torch.optim.NAdam, r"NAdam keeps \['mu_product'\] for each tensor"),
    ):
        optimizer = kind([param])
        with pytest.raises(ValueError, match=message):
            shard_optimizer_for(optimizer, optimizer.param_groups[0])
    optimizer = torch.optim.Adagrad([{"params": [param], "state_dtype": "bf16"}])
    with pytest.raises(ValueError, match="keeps its states in fp32"):
        shard_optimizer_for(optimizer, optimizer.param_groups[0])
