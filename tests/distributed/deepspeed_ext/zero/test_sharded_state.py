"""What a rank owns of the state: live, settable, and at any layout."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch.distributed as dist

import deepspeed_ext
from tests.distributed.deepspeed_ext.zero.test_optimizer import build_engine, train_step
from tests.helpers import run_distributed


def _shards_are_live(rank: int, world: int) -> None:
    deepspeed_ext.init_distributed()
    replicas = [dist.new_group([r]) for r in range(world)]
    groups = deepspeed_ext.ZeroGroups(dense=dist.group.WORLD, expert={"ep_size_2": replicas[rank]})
    with pytest.raises(ValueError, match=r"\['ep_size_2'\] have no process group"):
        build_engine(rank, world, (2,), groups=dataclasses.replace(groups, expert={}))
    engine = build_engine(rank, world, (2,), groups=groups)
    optimizer = engine.optimizer
    assert all(not shard.tensors["exp_avg"].any() for shard in optimizer.state_shards())
    for shard in optimizer.state_shards():
        shard.tensors["master"].fill_(2.0)
        shard.tensors["exp_avg_sq"].fill_(4.0)
    optimizer.sync_params_from_master()
    assert all((p == 2.0).all() for p in engine.module.parameters() if p.requires_grad)
    kept = weakref.ref(optimizer.state_shards()[0])
    assert kept() is not None, "what is written into copies must be there when it is synchronised"
    optimizer.step_count = 9
    optimizer.param_groups[0]["lr"] = 0.0
    decayed = [n for n, p in engine.module.named_parameters() if p.dim() > 1]
    train_step(engine, 0, rank)
    assert optimizer.step_count == 10
    for shard in optimizer.state_shards():
        assert (shard.tensors["exp_avg_sq"] > 3.0).all()
        if shard.name in decayed:
            assert (shard.tensors["master"] == 2.0).all(), "lr = 0 must hold for the next step"
    deepspeed_ext.shutdown()


def test_state_shards_are_live_and_settable() -> None:
    run_distributed(_shards_are_live, 2)
