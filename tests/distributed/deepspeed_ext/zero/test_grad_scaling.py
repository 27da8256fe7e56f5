"""fp16 with a loss scale on gloo ranks against torch.amp.GradScaler in one process.

The oracle runs the same micro-batches one after the other on an fp16 copy of fp32 masters. With two ranks even the
order of summation is the same: a difference would be one of the arithmetic around it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from tests.distributed.deepspeed_ext.stock import HAS_TORCH_STYLE
from tests.distributed.deepspeed_ext.zero.test_optimizer import ACCUMULATION, MAX_NORM, build_engine, dump, train_step
from tests.helpers import run_distributed
from tests.unit.deepspeed_ext import toy

STEPS = 9
POWER = 19  # too large a first scale: the first steps overflow
FP16 = {"enabled": True, "initial_scale_power": POWER, "hysteresis": 1}


def _matrices_by_muon(model: nn.Module) -> torch.optim.Optimizer:
    groups = toy.param_groups(model)
    return deepspeed_ext.Muon([{**groups[0], "use_muon": True}, {**groups[1], "use_muon": False}], lr=toy.LR)


@functools.cache
def _oracle(world: int, make: Any, power: int = POWER) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Final masters by name, each step's loss scale after it, each step's norm (0 where it was skipped)."""
    model, masters = toy.ToyModel((1,)).half(), toy.ToyModel((1,))
    for param, master in zip(model.parameters(), masters.parameters(), strict=True):
        master.data.copy_(param.data)
    optimizer = make(masters)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=10**6)
    scales, norms = [], []
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in masters.parameters()]
        for rank in range(world):
            mine = [torch.zeros_like(p) for p in masters.parameters()]
            for micro in range(ACCUMULATION):
                model.zero_grad()
                scaler.scale(model(toy.batch(step, micro, rank)) / ACCUMULATION).backward()
                for gradient, param in zip(mine, model.parameters(), strict=True):
                    gradient.add_(0.0 if param.grad is None else param.grad)
            total = [a + b for a, b in zip(total, mine, strict=True)]
        for gradient, master in zip(total, masters.parameters(), strict=True):
            master.grad = gradient / world if master.requires_grad else None
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(masters.parameters(), MAX_NORM))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        norms.append(norm if scaler.get_scale() == before else 0.0)
        scales.append(scaler.get_scale())
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            param.data.copy_(master.data)
    return {n: p.detach() for n, p in masters.named_parameters()}, scales, norms


def _allow_fp16() -> None:
    get_accelerator().is_fp16_supported = lambda: True  # torch computes in it on any processor, only slowly


def _engine(rank: int, world: int, ep: int, stage: int = 1, **config: Any) -> Any:
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    return build_engine(rank, world, (ep,), zero_optimization=zero, **{"fp16": FP16, **config})


def _norm(engine: Any) -> float:
    return 0.0 if engine.optimizer.overflow else float(engine.get_global_grad_norm())


def _train(engine: Any, rank: int, ep: int) -> dict[str, Any]:
    scales, norms = [], []
    for step in range(STEPS):
        train_step(engine, step, rank)
        scales.append(engine.optimizer.cur_scale)
        norms.append(_norm(engine))
    assert engine.skipped_steps == norms.count(0.0)
    assert engine.optimizer.step_count == STEPS - engine.skipped_steps
    assert {p.dtype for p in engine.module.parameters()} == {torch.float16}
    assert (engine.module.frozen == 1).all() and engine.module.frozen.grad is None
    return {"scales": scales, "norms": norms, "shards": dump(engine, rank, (ep,))}


def _runs(rank: int, world: int) -> dict[str, Any]:
    _allow_fp16()
    results = {"adamw": _train(_engine(rank, world, 1), rank, 1)}
    results["stage2"] = _train(_engine(rank, world, 1, stage=2), rank, 1)
    results["experts"] = _train(_engine(rank, world, 2), rank, 2)
    travelling: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp16"}, "communication_data_type": "fp16"}
    travelling["fp16"] = {"enabled": True, "initial_scale_power": 8}
    results["fp16 gradients"] = _train(_engine(rank, world, 2, stage=2, **travelling), rank, 2)
    each = {"deepspeed_ext": {"reduce_each_micro_batch": True}}
    results["stage1 summed as stage2"] = _train(_engine(rank, world, 1, **each), rank, 1)
    muon = _engine(rank, world, 1, stage=2, make=_matrices_by_muon)
    results["muon"] = _train(muon, rank, 1)
    deepspeed_ext.shutdown()
    return results


def _worst(results: list[Any], name: str, expected: dict[str, torch.Tensor]) -> float:
    """Largest distance of a master element, relative to its tensor's largest value."""
    worst = 0.0
    for result in results:
        for param, first, tensors in result[name]["shards"]:
            whole = expected[param].flatten()
            part = whole[first : first + tensors["master"].numel()]
            worst = max(worst, float((tensors["master"] - part).abs().max() / whole.abs().max()))
    return worst


def _checkpoint(rank: int, engine: Any, folder: str) -> list[float]:
    """The scale after a step and after the load of what was saved before it; then as another layout takes it over."""
    engine.save_checkpoint(folder, tag="fp16")
    saved = engine.optimizer.loss_scale_state
    loss = engine(toy.batch(0, 0, rank)) * 1e30
    for _ in range(ACCUMULATION):
        engine.backward(loss, retain_graph=True)
        engine.step()
    lowered = engine.optimizer.loss_scale
    assert engine.optimizer.overflow and not engine.was_step_applied()
    engine.load_checkpoint(folder, tag="fp16")
    assert engine.optimizer.loss_scale_state == saved
    other = _engine(rank, 2, 2, stage=2)
    assert other.optimizer.loss_scale == 2.0**POWER
    other.optimizer.loss_scale_state = saved
    return [saved["scale"], lowered, engine.optimizer.loss_scale, other.optimizer.loss_scale]


def _styles(rank: int, world: int) -> list[Any]:
    """Weights after engine.backward and after engine.scale(loss).backward() under a static scale; the error without."""
    weights: list[Any] = []
    for style in ("engine", "torch"):
        engine = _engine(rank, world, 1, gradient_accumulation_steps=1, fp16={"enabled": True, "loss_scale": 64})
        for step in range(2):
            loss = engine(toy.batch(step, 0, rank))
            engine.backward(loss) if style == "engine" or not HAS_TORCH_STYLE else engine.scale(loss).backward()
            engine.step()
        assert engine.optimizer.loss_scale == 64 and not engine.dynamic_loss_scale()
        weights.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
    with pytest.raises(RuntimeError, match="scaling is required" if HAS_TORCH_STYLE else "without a backward"):
        engine(toy.batch(2, 0, rank)).backward()
        for _ in range(0 if HAS_TORCH_STYLE else 2):  # the second says that the first had no backward
            engine.step()
    return [torch.equal(*weights)]


def _autocast(rank: int, world: int) -> tuple[list[float], float, bool]:
    """fp32 weights, fp16 arithmetic by torch_autocast: the same scale, losses that fall."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    engine = _engine(rank, world, 1, fp16={"enabled": False, "initial_scale_power": 17, "hysteresis": 1}, **autocast)
    losses = []
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            loss = engine(toy.batch(0, 0, rank))
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses, engine.optimizer.loss_scale, {p.dtype for p in engine.module.parameters()} == {torch.float32}


def _one_rank_overflows(engine: Any, rank: int) -> tuple[bool, bool, float]:
    """A loss that is finite in fp32 and too large for fp16 on one rank: nothing changes on any."""
    train_step(engine, 0, rank)
    before = [t.clone() for shard in engine.optimizer.state_shards() for t in shard.tensors.values()]
    for micro in range(ACCUMULATION):
        loss = engine(toy.batch(1, micro, rank))
        engine.backward(loss * 1e9 if rank == 1 and micro == 0 else loss)
        engine.step()
    overflow = engine.optimizer.overflow
    after = [t for shard in engine.optimizer.state_shards() for t in shard.tensors.values()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return overflow, same, engine.optimizer.loss_scale


def _around(rank: int, world: int, folder: str) -> dict[str, Any]:
    _allow_fp16()
    small = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}
    engine = _engine(rank, world, 2, fp16=small)
    results = {
        "one": [_one_rank_overflows(engine, rank), _one_rank_overflows(engine, rank)],
        "scales": _checkpoint(rank, engine, folder),
        "styles": _styles(rank, world),
        "autocast": _autocast(rank, world),
    }
    deepspeed_ext.shutdown()
    return results


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks have it: in fp16 another order of summation is no rounding that a tolerance of 1e-6 covers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_equals_a_grad_scaler_in_one_process(one_thread: None) -> None:
    results = run_distributed(_runs, 2)
    for name, optimizer, tolerance in (
        ("adamw", toy.adamw, 1e-6),
        ("stage2", toy.adamw, 1e-6),
        ("muon", _matrices_by_muon, 1e-6),
        ("experts", toy.adamw, 1e-2),  # experts' outputs are added over ranks in fp16
    ):
        expected, scales, norms = _oracle(2, optimizer)
        assert 2 < norms.count(0.0) < STEPS - 3, "both kinds of steps are needed for this test to mean anything"
        for result in results:
            assert result[name]["scales"] == scales
            assert result[name]["norms"] == pytest.approx(norms, rel=max(1e-6, tolerance))
        assert _worst(results, name, expected) <= tolerance, name
    for result in results:
        pairs = zip(result["stage1 summed as stage2"]["shards"], result["stage2"]["shards"], strict=True)
        assert all(torch.equal(a[2][kind], b[2][kind]) for a, b in pairs for kind in a[2])
    expected, scales, norms = _oracle(2, toy.adamw, 8)  # sums over ranks may overflow where their parts do not
    assert min(norms) > 0
    assert all(result["fp16 gradients"]["scales"] == scales for result in results)
    assert _worst(results, "fp16 gradients", expected) <= 2e-2


def test_overflow_checkpoint_styles_and_autocast(tmp_path: Path) -> None:
    for result in run_distributed(_around, 2, str(tmp_path)):
        # hysteresis 2: the second overflow halves, and so does every later one until steps without overflow refill it
        assert result["one"] == [(True, True, 256.0), (True, True, 128.0)]
        assert result["scales"] == [128.0, 64.0, 128.0, 128.0]
        assert result["styles"] == [True]
        losses, scale, are_fp32 = result["autocast"]
        assert losses[-1] < losses[0] and scale <= 2.0**17 and are_fp32
