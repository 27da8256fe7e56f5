"""What DeepSpeed's users reach into: full values of sharded parameters, gradients in no_sync, the inner state."""

from __future__ import annotations

import copy
import io
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn
from torch.utils._pytree import tree_map

import deepspeed_ext
from tests.distributed.deepspeed_ext.stock import HAS_TORCH_STYLE
from tests.distributed.deepspeed_ext.zero.test_stock_files import CONFIG, Model, batch
from tests.helpers import run_distributed

WIDTH, WORLD, LR = 40, 2, 1e-2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.first(x))).square().mean()


def _input(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _serial(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Mean gradients, those of the experts from this rank's tokens alone, and weights after a step of AdamW."""
    model = _Model()
    losses = [model(_input(r)) for r in range(WORLD)]
    experts = torch.autograd.grad(losses[rank] / WORLD, list(model.expert.parameters()), retain_graph=True)
    sum(losses[1:], start=losses[0]).div(WORLD).backward()
    for param, gradient in zip(model.expert.parameters(), experts, strict=True):
        param.grad = gradient
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    torch.optim.AdamW(model.parameters(), lr=LR).step()
    return gradients, {name: param.detach().clone() for name, param in model.named_parameters()}


def _access(rank: int, world: int, stage: int, dtype: str) -> None:
    gradients, weights = _serial(rank)
    model = _Model()
    engine, optimizer, *_ = deepspeed_ext.initialize(
        model=model,
        optimizer=torch.optim.AdamW([{"params": list(model.parameters()), "state_dtype": dtype}], lr=LR),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 700},  # every matrix lies in several buckets
        },
        is_expert=lambda name: "ep_size_2" if "expert" in name else None,
    )
    named = dict(engine.module.named_parameters())

    def backward() -> None:
        engine.backward(engine(_input(rank)))

    def check(found: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max()), (
            found.flatten()[:4],
            wanted.flatten()[:4],
            tolerance,
        )

    backward()
    for name, param in named.items():
        check(safe_get_full_grad(param), gradients[name])
    engine.step()
    for name, param in named.items():
        check(safe_get_full_fp32_param(param), weights[name])
        coarse = 1e-5 if dtype == "fp32" else 0.13  # codes are 1/8 apart
        check(safe_get_full_optimizer_state(param, "exp_avg"), 0.1 * gradients[name], coarse)
        assert safe_get_full_grad(param) is None, "it belongs to the step that was taken"
    with pytest.raises(ValueError, match=r"keeps no state .momentum. of .first\.weight.; it has exp_avg, exp_avg_sq"):
        safe_get_full_optimizer_state(named["first.weight"], "momentum")
    with pytest.raises(RuntimeError, match=r".first\.bias. has no reduced gradient to set"):
        safe_set_full_grad(named["first.bias"], torch.zeros(WIDTH))

    # What is set is what the next step works with.
    target = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for name, p in named.items()}
    backward()
    for name, param in named.items():
        safe_set_full_fp32_param(param, target[name])
        assert torch.equal(param.detach(), target[name]), "no rank has old values beside new ones"
        safe_set_full_optimizer_state(param, torch.ones_like(target[name]), "exp_avg")
        safe_set_full_grad(param, torch.full_like(param, 0.5))
        check(safe_get_full_fp32_param(param), target[name])
        check(safe_get_full_grad(param), torch.full_like(target[name], 0.5))
    optimizer.param_groups[0]["lr"] = 0.0
    engine.step()
    for name, param in named.items():
        assert torch.equal(param.detach(), target[name]), "the weights follow with the step"
        coarse = 1e-5 if dtype == "fp32" else 0.13  # codes are 1/8 apart
        check(safe_get_full_optimizer_state(param, "exp_avg"), torch.full_like(target[name], 0.9 + 0.1 * 0.5), coarse)
    assert copy.deepcopy(engine.module)(_input(rank)).ndim == 0, "copies have nothing to do with the optimizer"
    engine.destroy()
    assert safe_get_full_fp32_param(named["first.weight"]) is None


def _all(rank: int, world: int) -> None:
    for stage, dtype in ((1, "fp32"), (2, "int8")):
        _access(rank, world, stage, dtype)
    deepspeed_ext.shutdown()


def test_full_values_of_sharded_parameters() -> None:
    run_distributed(_all, WORLD)


def _poked(rank: int, initialize: Any) -> dict[str, Any]:
    """What clients read of an engine: gradients inside and after ``no_sync``, and the inner optimizer's steps."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.utils import safe_get_full_grad

    engine, optimizer, _, _ = initialize(model=Model(), config=copy.deepcopy(CONFIG))
    params = list(engine.module.parameters())

    def gradients() -> list[torch.Tensor]:
        return [safe_get_full_grad(param).detach().float().clone() for param in params]

    found: dict[str, Any] = {"is ZeRO": isinstance(optimizer, ZeROOptimizer)}
    found["scales"] = [optimizer.loss_scaler.cur_scale, optimizer.loss_scaler.loss_scale, optimizer.loss_scale]
    shards = [shard for group in optimizer.parallel_partitioned_bit16_groups for shard in group]
    found["aligned"] = all(shard.data_ptr() % (2 * optimizer.nccl_start_alignment_factor) == 0 for shard in shards)
    found["sum of shards"] = [sum(float(part.double().sum()) for part in parts) for parts in (shards, params)]
    with engine.no_sync():
        for step in range(2):
            engine.backward(engine(batch(rank, step)))
            found[f"inside {step}"] = gradients()
    engine.backward(engine(batch(rank, 2)))
    found["reduced"] = gradients()
    engine.step()
    engine.backward(engine(batch(rank, 3)))
    engine.step()
    states = optimizer.optimizer.state
    found["steps"] = {
        float(states[master]["step"]) for group in optimizer.optimizer.param_groups for master in group["params"]
    }
    mapped = tree_map(lambda leaf: None, optimizer.optimizer.state_dict()["state"])  # as programs gather it
    found["mapped"] = [dict(sorted(state.items())) for state in mapped.values()]
    saved = io.BytesIO()
    torch.save(optimizer.optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)["state"].values()
    found["saved"] = [(type(state), float(state["step"]), state["exp_avg"].norm().item()) for state in loaded]
    found["live"] = [states[master]["exp_avg"].norm().item() for master in states if states[master]]
    found["assertions"] = _assertions(engine, initialize)
    engine.destroy()
    return found


def _assertions(engine: Any, initialize: Any) -> list[str]:
    """Which wrong calls a program can catch as AssertionError."""

    def coalesce_in_no_sync() -> None:
        with engine.no_sync(), engine.coalesce_grad_reduction():
            pass

    def step_in_no_sync() -> None:
        with engine.no_sync():
            engine.step()

    caught = []
    calls = {"no model": lambda: initialize(model=None, config=copy.deepcopy(CONFIG)), "step": step_in_no_sync}
    if HAS_TORCH_STYLE:
        calls["vector"] = lambda: engine.backward(engine.module(batch(0, 0)).reshape(1).expand(2))
    calls["batch"] = lambda: initialize(model=Model(), config=copy.deepcopy(CONFIG) | {"train_batch_size": 7})
    odd = copy.deepcopy(CONFIG) | {"zero_optimization": {"stage": 2, "allgather_bucket_size": 1001}}
    calls["odd buckets"] = lambda: initialize(model=Model(), config=odd)
    if hasattr(DeepSpeedEngine, "coalesce_grad_reduction"):
        calls["coalesce"] = coalesce_in_no_sync
    for name, call in calls.items():
        try:
            call()
        except AssertionError:
            caught.append(name)
    return caught


def _pokes(rank: int, world: int) -> list[dict[str, Any]]:
    deepspeed_ext.init_distributed()
    results = [_poked(rank, deepspeed.initialize), _poked(rank, deepspeed_ext.initialize)]
    # Stage 3 goes back to DeepSpeed: its function may have been replaced by ours without the module patch.
    stock, deepspeed.initialize = deepspeed.initialize, deepspeed_ext.initialize
    try:
        engine, *_ = deepspeed.initialize(
            model=Model(), config=copy.deepcopy(CONFIG) | {"zero_optimization": {"stage": 3}}
        )
        results.append({"stage 3": type(engine.optimizer).__name__})
    finally:
        deepspeed.initialize = stock
    dist.barrier()
    deepspeed_ext.shutdown()
    return results


def test_gradients_in_no_sync_and_inner_state_are_those_of_stock() -> None:
    for stock, ours, handed_back in run_distributed(_pokes, WORLD):
        assert handed_back == {"stage 3": "DeepSpeedZeroOptimizer_Stage3"}
        assert ours.keys() == stock.keys()
        assert ours["is ZeRO"] and stock["is ZeRO"]
        assert ours["steps"] == stock["steps"] == {2.0}
        assert ours["mapped"][0] == stock["mapped"][0] == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"))
        # Ours has an entry for each bucket, stock one for each group.
        assert {(kind, step) for kind, step, _ in ours["saved"]} == {(kind, step) for kind, step, _ in stock["saved"]}
        assert [norm for *_, norm in ours["saved"]] == ours["live"]
        assert ours["assertions"] == stock["assertions"]
        assert {"no model", "step", "batch", "odd buckets"} <= set(ours["assertions"])
        assert ours["aligned"] and stock["aligned"]
        assert ours["sum of shards"] == pytest.approx([stock["sum of shards"][1]] * 2, abs=1e-6)
        assert "vector" in ours["assertions"] or not HAS_TORCH_STYLE
        assert "coalesce" in ours["assertions"] or not hasattr(DeepSpeedEngine, "coalesce_grad_reduction")
        assert ours["scales"] == stock["scales"] == [1.0, 1.0, 1.0]
        for what in ("inside 0", "inside 1", "reduced"):
            for gradient, expected in zip(ours[what], stock[what], strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=what)
