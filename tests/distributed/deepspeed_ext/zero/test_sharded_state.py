"""What a rank owns of the state: live, settable, and at any layout."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from deepspeed_ext.optimizers import OPTIMIZERS, Lion
from tests.distributed.deepspeed_ext.zero.test_optimizer import build_engine, train_step
from tests.distributed.deepspeed_ext.zero.test_stock_files import CONFIG, Model, batch
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


Make = Callable[[Any], torch.optim.Optimizer]


def _trained(rank: int, make: Make, steps: int, average: bool = False, is_bf16: bool = False) -> Any:
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"} | {"bf16": {"enabled": is_bf16}}
    model = Model()
    engine, *_ = deepspeed_ext.initialize(model=model, optimizer=make(model.parameters()), config=copy.deepcopy(config))
    if average:
        engine.optimizer.keep_average(evaluates=True)
    for step in range(steps):
        engine.backward(engine(batch(rank, step).to(next(engine.module.parameters()).dtype)))
        engine.step()
    if average:
        engine.optimizer.update_average(0.25)
    return engine


def _kept(engine: Any) -> list[torch.Tensor]:
    """Masters, then averages."""
    shards = engine.optimizer._shards()
    return [one.clone() for one in [*(shard.master for shard in shards), *(shard.average for shard in shards)]]


def _in_int8(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(params), "state_dtype": "int8"}], lr=0.05)


def _files(rank: int, world: int, folder: str) -> None:
    deepspeed_ext.init_distributed()
    adamw: Make = torch.optim.AdamW
    # The average goes into the module for an evaluation only: files have masters and average as they are.
    for is_bf16 in (True, False):
        before = _trained(rank, adamw, 2, average=True, is_bf16=is_bf16)
        before.save_checkpoint(folder, tag="average")
        after = _trained(rank, adamw, 0, average=True, is_bf16=is_bf16)
        after.load_checkpoint(folder, tag="average")
        assert all(map(torch.equal, _kept(before), _kept(after)))
    written = {name: _trained(rank, make, 2) for name, make in {"adamw": adamw, "lion": Lion}.items()}
    for name, engine in written.items():
        engine.save_checkpoint(folder, tag=name)
    after.load_checkpoint(folder, tag="adamw")
    for shard in after.optimizer._shards():
        assert torch.equal(shard.average, shard.master), "a file without an average: it begins at the weights"
    # States of another optimizer, or in another code, are refused; weights alone are not.
    adafactor = OPTIMIZERS["Adafactor"]
    for tag, other, words in (
        ("lion", adamw, r"\(exp_avg\) than AdamW keeps here \(exp_avg, exp_avg_sq\)"),
        ("adamw", _in_int8, r"\(exp_avg, exp_avg_sq\) than AdamW keeps here \(exp_avg, exp_avg.scale, "),
        ("adamw", torch.optim.SGD, r"\(exp_avg, exp_avg_sq\) than SGD keeps here \(none\)"),
        ("adamw", adafactor, r"\) than Adafactor keeps here \(exp_avg_sq_col, exp_avg_sq_row\)"),
    ):
        engine = _trained(rank, other, 0)
        with pytest.raises(ValueError, match=words):
            engine.load_checkpoint(folder, tag=tag)
        engine.load_checkpoint(folder, tag=tag, load_optimizer_states=False)
        assert all(map(torch.equal, written[tag].module.parameters(), engine.module.parameters()))
    deepspeed_ext.shutdown()


def test_files_give_what_the_optimizer_keeps_or_are_refused(tmp_path: Path) -> None:
    run_distributed(_files, 2, str(tmp_path))


class _Half(nn.Module):
    """Uses the first of two layers, which lie in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).square().mean()


def _dropped(rank: int, world: int) -> None:
    engine, *_ = deepspeed_ext.initialize(
        model=(model := _Half()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={**CONFIG, "optimizer": {}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 700}},
    )
    before = model.layers[0].weight.detach().clone()
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.full((2, 40), 100.0)))
        engine.zero_grad()
        assert all(state.buffer is None for state in engine.optimizer._reducer._queue)
        engine.backward(engine(torch.zeros(2, 40)))
    engine.step()
    assert torch.equal(model.layers[0].weight, before), "gradients that were dropped have no part in the step"
    deepspeed_ext.shutdown()


def test_stage_2_drops_gradients_that_no_reduction_took() -> None:
    run_distributed(_dropped, 2)


def _frozen_in_stage_3(rank: int, world: int) -> None:
    model = Model()
    model.layers[0].weight.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {**CONFIG, "optimizer": {}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed_ext.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    shards = deepspeed_ext.Stage3States(engine).state_shards()
    assert [shard.name for shard in shards] == ["layers.0.bias", "layers.2.weight", "layers.2.bias"]
    deepspeed_ext.shutdown()


def test_a_frozen_parameter_has_no_states_in_stage_3() -> None:
    run_distributed(_frozen_in_stage_3, 1)
