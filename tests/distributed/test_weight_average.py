"""The moving average of the weights under the sharded optimizer: its values, and the exchange for an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed_ext
from tests.distributed.zero_stack import WIDTH, Stack, input_of, sharded
from tests.helpers import run_distributed


def _weights(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _step(model: torch.nn.Module, optimizer: Any, step: int, rank: int, dtype: torch.dtype) -> None:
    optimizer.set_gradient_accumulation_boundary(True)
    model(input_of(step, rank).to(dtype)).backward()
    optimizer.reduce_gradients()
    optimizer.backward_epilogue()
    optimizer.step()


def _averages(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    model = Stack(dtype)
    optimizer = sharded(model, overlap_param_gather=True)
    optimizer.keep_average(evaluates=True)
    expected = [shard.average.clone() for shard in optimizer._shards()]
    for step in range(4):
        _step(model, optimizer, step, rank, dtype)
        optimizer.update_average(0.25)
        for own, shard in zip(expected, optimizer._shards(), strict=True):
            own.add_(0.25 * (shard.master - own))
    error = max(float((a - s.average).abs().max()) for a, s in zip(expected, optimizer._shards(), strict=True))
    kept = [shard.kept["ema"].clone() for shard in optimizer._shards()]
    optimizer.wait_for_params()
    trained, masters = _weights(model), [shard.master.clone() for shard in optimizer._shards()]
    shards = optimizer.state_shards()
    whole = {one.name: torch.zeros(one.param.numel()) for one in shards}
    for one in shards:
        whole[one.name][one.start : one.stop] = one.tensors["ema"]
    with optimizer.averaged_parameters():
        inside = {name: p.detach().clone() for name, p in model.named_parameters()}
        for what in (optimizer.state_dict, optimizer.step):  # they would take the average for the masters
            with pytest.raises(RuntimeError, match=rf"{what.__name__} inside averaged_parameters\(\)"):
                what()
    back = all(map(torch.equal, trained, _weights(model)))
    back &= all(torch.equal(m, s.master) for m, s in zip(masters, optimizer._shards(), strict=True))
    back &= all(torch.equal(a, s.average) for a, s in zip(kept, optimizer._shards(), strict=True))
    _step(model, optimizer, 4, rank, dtype)  # goes on after an evaluation
    optimizer.destroy()
    return {"error": error, "back": back, "inside": inside, "whole": whole}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_evaluation_sees_the_average_and_leaves_no_trace(dtype: torch.dtype) -> None:
    first, second = run_distributed(_averages, 2, dtype)
    for found in (first, second):
        assert found["error"] < 1e-6 and found["back"]
        for name, inside in found["inside"].items():  # every element is owned by one of the two
            average = sum(one["whole"].get(name, 0) for one in (first, second))
            assert torch.equal(inside.flatten(), average.to(dtype)), name


def test_schedule_free_keeps_no_second_average() -> None:
    [message] = run_distributed(_refused, 1)
    assert "keeps an average of its own" in message


def _refused(rank: int, world: int) -> str:
    model = Stack()
    optimizer = sharded(model, deepspeed_ext.optimizers.OPTIMIZERS["ScheduleFreeSGD"](model.parameters()))
    with pytest.raises(ValueError, match="schedule-free") as error:
        optimizer.keep_average(evaluates=True)
    return str(error.value)


def _scaled_rows(rank: int, world: int) -> None:
    factors = torch.linspace(0.5, 1.5, WIDTH)
    make = deepspeed_ext.optimizers.OPTIMIZERS["ScheduleFreeSGD"]
    models = [Stack(torch.bfloat16) for _ in range(2)]
    plain, scaled = (sharded(model, make(model.parameters())) for model in models)
    for step in range(2):
        if step == 1:
            scaled.scale_rows_after_update({models[1].bare.weight: factors})
        for model, optimizer in zip(models, (plain, scaled), strict=True):
            _step(model, optimizer, step, rank, torch.bfloat16)
    parameters = models[1].bare.weight.detach().flatten()
    for own, other in zip(plain.state_shards(), scaled.state_shards(), strict=True):
        expected = {kind: tensor.clone() for kind, tensor in own.tensors.items()}
        if own.name == "bare.weight":
            for tensor in expected.values():
                tensor.mul_(factors[torch.arange(own.start, own.stop) // WIDTH])
            trained = torch.lerp(expected["master"], expected["z"], 0.1).bfloat16()
            assert torch.equal(parameters[own.start : own.stop], trained), "the model is trained between the two"
        assert all(torch.equal(other.tensors[kind], tensor) for kind, tensor in expected.items()), own.name
    assert len(expected) == 2


def test_rows_of_all_weights_of_a_schedule_free_optimizer_are_scaled() -> None:
    run_distributed(_scaled_rows, 2)
