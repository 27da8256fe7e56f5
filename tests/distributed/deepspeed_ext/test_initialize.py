"""Skipped steps, bad input, DeepSpeed's contract and checkpoints: what surrounds the exact step."""

from __future__ import annotations

import copy
import logging
import math
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from deepspeed_ext import versions
from tests.distributed.deepspeed_ext.stock import HAS_TORCH_STYLE
from tests.distributed.deepspeed_ext.zero.test_optimizer import ACCUMULATION, WORLD, build_engine, train_step
from tests.helpers import run_distributed
from tests.unit.deepspeed_ext import toy

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 1}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _snapshot(engine: Any) -> list[torch.Tensor]:
    shards = [t.clone() for shard in engine.optimizer.state_shards() for t in shard.tensors.values()]
    return shards + [p.detach().clone() for p in engine.module.parameters()]


def _nan_on_one_rank(rank: int, world: int) -> tuple[bool, bool, int, int, bool]:
    engine = build_engine(rank, world, (2,))
    scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer.optimizer)
    engine.lr_scheduler = scheduler
    train_step(engine, 0, rank)
    before = _snapshot(engine)
    for micro in range(ACCUMULATION):
        loss = engine(toy.batch(1, micro, rank))
        engine.backward(loss * float("nan") if rank == 3 and micro == 0 else loss)
        engine.step()
    untouched = all(torch.equal(a, b) for a, b in zip(before, _snapshot(engine), strict=True))
    overflow, skipped = engine.optimizer.overflow, engine.skipped_steps
    assert not engine.was_step_applied() and math.isnan(engine.get_global_grad_norm())
    assert scheduler.last_epoch == 2, "the engine has not been told yet"
    train_step(engine, 2, rank)  # the bad gradients are gone
    assert scheduler.last_epoch == engine.optimizer.step_count == 2 and engine.was_step_applied()
    assert engine.skipped_steps == 1
    recovered = not engine.optimizer.overflow and bool(torch.isfinite(torch.cat([t.flatten() for t in before])).all())
    result = (overflow, untouched, skipped, engine.optimizer.step_count, recovered)
    deepspeed_ext.shutdown()
    return result


def test_nan_on_one_rank_skips_the_step_on_all() -> None:
    assert run_distributed(_nan_on_one_rank, WORLD) == [(True, True, 1, 2, True)] * WORLD


def _error_of(**arguments: Any) -> str:
    try:
        deepspeed_ext.initialize(**{"config": {**CONFIG, **SGD}, **arguments})
    except ValueError as error:
        return str(error)
    return "no error"


def _mark(param: nn.Parameter, group_name: str) -> nn.Parameter:
    param.allreduce, param.group_name = False, group_name  # type: ignore[attr-defined]
    return param


def _step_without_backward() -> dict[str, str]:
    """The errors, by what must be in them; what was warned of on the way."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepspeed_ext")
    logger.addHandler(handler)
    engine, *_ = deepspeed_ext.initialize(
        model=nn.Linear(3, 1), config={**CONFIG, **SGD, "steps_per_prin": 5}, is_expert=lambda _: None
    )
    logger.removeHandler(handler)
    told = sorted(line.split(":")[0] for line in warned if "keys that nothing" in line or "is_expert" in line)
    assert len(told) == (2 if dist.get_rank() == 0 else 0), warned
    errors = []
    for backward in (False, True, False, True):  # the step after is the one that says so, on every rank
        if backward:
            engine.backward(engine(torch.ones(2, 3)).sum())
        try:
            engine.step()
        except RuntimeError as error:
            errors.append(str(error))
    wrong = {
        "(2, 1), requires_grad=True": engine(torch.ones(2, 3)),
        "1.5": 1.5,
        "(), requires_grad=False": torch.ones(()),
    }
    for said, loss in wrong.items():
        with pytest.raises(ValueError, match=f"needs a scalar tensor that .*got {re.escape(said)}"):
            engine.backward(loss)
    return {"without a backward since": errors[0], "call engine.backward(loss) first": errors[1]}


def _bad_input(rank: int, world: int) -> dict[str, str]:
    deepspeed_ext.init_distributed()
    errors = _bad_parameters(rank) | _bad_configurations(rank) | _bad_experts() | _step_without_backward()
    deepspeed_ext.shutdown()
    return errors


def _bad_parameters(rank: int) -> dict[str, str]:
    errors = {}
    model = nn.Linear(3, 3)
    _mark(model.weight, "ep_size_3")
    errors["ep_size_3') must divide the 4"] = _error_of(model=model)
    model = nn.Linear(3, 3)
    _mark(model.weight, "experts")
    errors["'ep_size_N'"] = _error_of(model=model)
    errors["'weight' (3, 5)"] = _error_of(model=nn.Linear(5 if rank == 2 else 4, 3))
    twisted = nn.Linear(4, 3)
    order = [twisted.weight, twisted.bias] if rank != 1 else [twisted.bias, twisted.weight]
    per_group = torch.optim.SGD([{"params": [p]} for p in order], lr=0.1)
    errors["'weight' (3, 4) torch.float32 in parameter group 1"] = _error_of(model=twisted, optimizer=per_group)
    model = nn.Linear(3, 3)
    if rank % 2:
        _mark(model.weight, "ep_size_2")  # the peers of rank 0's replica hold it too, rank 0 itself says dense
    errors["disagree on the dense parameters"] = _error_of(model=model)
    errors["sparse=True"] = _error_of(model=nn.Embedding(5, 3, sparse=True))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})
    errors["twice"] = _error_of(model=model, optimizer=optimizer)
    model[1].weight.data = model[0].weight.data
    errors["share memory"] = _error_of(model=model)
    model = nn.Linear(3, 3)
    errors["LBFGS needs whole tensors"] = _error_of(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    errors["no parameter that requires a gradient"] = _error_of(
        model=frozen, optimizer=torch.optim.SGD(frozen.parameters())
    )
    errors["needs model=, a torch.nn.Module, got NoneType (on 1 rank(s), first rank 1)"] = _error_of(
        model=None if rank == 1 else nn.Linear(3, 3)
    )
    return errors


def _bad_configurations(rank: int) -> dict[str, str]:
    errors = {}
    broken = {"optimizer": {"type": "OneBitLamb" if rank == 3 else "SGD", "params": {"lr": 0.1}}}
    errors["on 1 rank(s), first rank 3"] = _error_of(model=nn.Linear(3, 3), config={**CONFIG, **broken})
    fp16 = {"fp16": {"enabled": True, "hysteresis": 0 if rank == 2 else 2}}
    errors["hysteresis=0"] = _error_of(model=nn.Linear(3, 3), config={**CONFIG, **SGD, **fp16})
    sizes = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000 + rank}}
    errors["disagree on options"] = _error_of(model=nn.Linear(3, 3), config={**CONFIG, **SGD, **sizes})
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = deepspeed_ext.ZeroGroups(dense=halves[rank // 2], expert={})
    errors["2 ranks and the model group 1, of 4"] = _error_of(model=nn.Linear(3, 3), groups=groups)
    errors["no optimizer"] = _error_of(model=nn.Linear(3, 3), config=CONFIG)
    errors["no/such.json' does not exist (on 1 rank(s), first rank 2)"] = _error_of(
        model=nn.Linear(3, 3), config="/no/such.json" if rank == 2 else {**CONFIG, **SGD}
    )
    own = {"train_batch_size": 12 if rank == 3 else 8}
    errors["train_batch_size is not equal to"] = _error_of(model=nn.Linear(3, 3), config={**CONFIG, **SGD, **own})
    own = {"gradient_accumulation_steps": 1 + rank // 2}
    errors["gradient_accumulation_steps: rank 0 has 1, rank 2 has 2"] = _error_of(
        model=nn.Linear(3, 3), config={**CONFIG, **SGD, **own}
    )
    own = {"zero_optimization": {"stage": 3 if rank == 1 else 1}}
    errors["who runs the optimizer: rank 0 has deepspeed_ext, rank 1 has ZeRO stage 3"] = _error_of(
        model=nn.Linear(3, 3), config={**CONFIG, **SGD, **own}
    )
    own = {"optimizer": {"type": "SGD", "params": {"lr": 0.1 * (1 + rank // 3)}}}
    errors["lr=0.2, "] = _error_of(model=nn.Linear(3, 3), config={**CONFIG, **own})
    return errors


def _bad_experts() -> dict[str, str]:
    errors = {}
    errors["is_expert('weight') returned True; return a name such as"] = _error_of(
        model=nn.Linear(3, 3), is_expert=lambda _: True
    )
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    errors["returned None for '0.weight' and 'ep_size_2' for '1.weight', which are one parameter"] = _error_of(
        model=tied, is_expert=lambda name: "ep_size_2" if name == "1.weight" else None
    )
    return errors


def test_bad_input_is_one_clear_error_on_every_rank() -> None:
    results = run_distributed(_bad_input, WORLD)
    for wanted, message in results[0].items():
        assert wanted in message, f"{wanted!r} not in {message!r}"
    assert all(result == results[0] for result in results), "every rank must raise the same error"


class _SomeExperts(nn.Module):
    """Experts of group ep_size_4 on the first two ranks only; one tensor larger than all others together."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 5)
        self.expert = _mark(nn.Parameter(torch.ones(301)), "ep_size_4") if has_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.dense(x).square().mean()
        return loss + self.expert.square().mean() if self.expert is not None else loss


def _experts_on_some_ranks(rank: int, world: int) -> tuple[int, float]:
    torch.manual_seed(0)
    deepspeed_ext.init_distributed()
    engine, optimizer, _, _ = deepspeed_ext.initialize(model=_SomeExperts(rank < 2), config={**CONFIG, **SGD})
    engine.backward(engine(torch.ones(2, 3)))
    engine.step()
    norm = float(engine.get_global_grad_norm())
    reference = _SomeExperts(True)
    reference.load_state_dict({"expert": torch.ones(301), **_dense_weights()})
    reference(torch.ones(2, 3)).backward()
    dense = sum(p.grad.square().sum() for p in reference.dense.parameters() if p.grad is not None)
    assert reference.expert is not None and reference.expert.grad is not None
    # Two ranks have an expert each (different ones); each saw one of the four ranks' losses.
    true = float((dense + 2 * (reference.expert.grad / world).square().sum()).sqrt())
    assert abs(norm - true) < 1e-6 * true, (norm, true)
    result = (sum(s.stop - s.start for s in optimizer.state_shards()), norm)
    deepspeed_ext.shutdown()
    return result


def _dense_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dense = nn.Linear(3, 5)
    return {"dense.weight": dense.weight.detach(), "dense.bias": dense.bias.detach()}


def test_a_rank_without_experts_takes_part() -> None:
    results = run_distributed(_experts_on_some_ranks, WORLD)
    assert [owned for owned, _ in results][:2] == [301 + 5, 301 + 15]  # bias before weight, each at a multiple of 256
    assert sum(owned for owned, _ in results) == 2 * 301 + 20
    assert len({norm for _, norm in results}) == 1


def _checkpoint(rank: int, world: int, folder: str) -> tuple[bool, bool]:
    engine = build_engine(rank, world, (2,))
    for step in range(2):
        train_step(engine, step, rank)
    engine.save_checkpoint(folder, tag="two")
    train_step(engine, 2, rank)
    expected = _snapshot(engine)
    engine.load_checkpoint(folder, tag="two")
    count_restored = engine.optimizer.step_count == 2
    train_step(engine, 2, rank)
    same = all(torch.equal(a, b) for a, b in zip(expected, _snapshot(engine), strict=True))
    deepspeed_ext.shutdown()
    return same, count_restored


def test_deepspeed_checkpoint_resumes_bitwise(tmp_path: Path) -> None:
    for same, count_restored in run_distributed(_checkpoint, WORLD, str(tmp_path)):
        assert same and count_restored


_WEIGHTS_ALONE: list[dict[str, bool]] = [
    {"load_module_only": True},
    {"load_optimizer_states": False},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
]


def _weights_alone(rank: int, world: int, folder: str, half: bool, freeze: bool) -> list[str]:
    """Loads the weights of a checkpoint into fresh engines of other weights; returns what is not as in stock."""
    config = {"bf16": {"enabled": half}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 700}}
    config |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}}}

    def build(shift: float) -> Any:
        def make(model: Any) -> torch.optim.Optimizer:
            for param in model.parameters():
                param.data += shift
            for part in model.experts if freeze else ():
                part.down_NDH.requires_grad_(False)
                part.down_NDH.data += rank % 2  # those of one rank in two differ
            return toy.adamw(model)

        return build_engine(rank, world, (2,), make=make, **copy.deepcopy(config))

    engine = build(0.0)
    for step in range(2):
        train_step(engine, step, rank)
    engine.save_checkpoint(folder, tag="two")
    saved = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    wrong = []
    for options in _WEIGHTS_ALONE:
        other = build(1.0)
        path, _ = other.load_checkpoint(folder, tag="two", **options)
        optimizer = other.optimizer
        found = {
            "path": path is not None,
            "weights": all(torch.equal(p, saved[n]) for n, p in other.module.named_parameters()),
            "masters": all(
                torch.equal(s.tensors["master"], saved[s.name].flatten()[s.start : s.stop].float())
                for s in optimizer.state_shards()
            ),
            "moments": not any(s.tensors["exp_avg"].any() for s in optimizer.state_shards()),
            "count": optimizer.step_count == 0,
            "steps": other.global_steps == (0 if options.get("load_module_only") else 2),
            "scheduler": (other.lr_scheduler.last_batch_iteration == 1)
            == (not options.get("load_module_only") and options.get("load_lr_scheduler_states", True)),
        }
        train_step(other, 2, rank)
        found["goes on"] = optimizer.step_count == 1 and not optimizer.overflow
        wrong += [f"{options}: {name}" for name, is_right in found.items() if not is_right]
    file = Path(folder) / "two" / f"{'bf16_' if half else ''}zero_pp_rank_1_mp_rank_00_optim_states.pt"
    dist.barrier()
    if rank == 0:
        file.unlink()
    dist.barrier()
    try:
        build(1.0).load_checkpoint(folder, tag="two", load_module_only=True)
        wrong.append("a missing file was not noticed")
    except ValueError as error:
        wrong += [] if "zero_pp_rank_1" in str(error) else [str(error)]
    deepspeed_ext.shutdown()
    return wrong


@pytest.mark.parametrize(("half", "freeze"), [(False, False), (True, False), (True, True)])
def test_weights_alone_load_also_where_experts_are_spread(tmp_path: Path, half: bool, freeze: bool) -> None:
    assert run_distributed(_weights_alone, WORLD, str(tmp_path), half, freeze) == [[]] * WORLD


# What DeepSpeed 0.19.8's engine asks of a stage 1 or 2 optimizer: reduce, step, norm, checkpoints. An engine of an
# earlier version asks for those that its own optimizer has.
ATTRIBUTES = """
    custom_loss_scaler external_loss_scale torch_autocast_gradscaler loss_scaler overflow _global_grad_norm
    cur_scale param_groups state dp_process_group bit16_groups round_robin_bit16_groups optimizer
"""
METHODS = """
    reduce_gradients step zero_grad state_dict load_state_dict _restore_from_bit16_weights refresh_fp32_params
    update_lp_params destroy backward_prologue backward_epilogue enter_backward exit_backward needs_scaler
    scale_if_loss set_gradient_accumulation_boundary register_grad_acc_post_hook clear_backward_seen_flag
    queue_post_backward_callback overlapping_partition_gradients_reduce_epilogue
    finalize_gradient_accumulation_boundary
"""


def _adagrad_equals_torch() -> None:
    """It makes its states when it is built, which is not to have taken a step; one that has is refused."""
    torch.manual_seed(3)
    model, reference = nn.Linear(5, 3), nn.Linear(5, 3)
    reference.load_state_dict(model.state_dict())
    expected = torch.optim.Adagrad(reference.parameters(), lr=0.1, initial_accumulator_value=0.5)
    own = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    engine, *_ = deepspeed_ext.initialize(model=model, optimizer=own, config=CONFIG)
    for step in range(3):
        x = torch.full((2, 5), 1.0 + step)
        engine.backward(engine(x).square().mean())
        engine.step()
        expected.zero_grad()
        reference(x).square().mean().backward()
        expected.step()
        torch.testing.assert_close(model.weight, reference.weight)
    assert "the optimizer has taken steps already" in _error_of(model=reference, optimizer=expected, config=CONFIG)


def _contract(rank: int, world: int) -> list[str]:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    engine = build_engine(rank, world, (1,))
    optimizer = engine.optimizer
    assert isinstance(optimizer, ZeROOptimizer) and not engine.has_moe_layers
    assert type(optimizer).backward is versions.BaseOptimizer.backward
    missing = [name for name in ATTRIBUTES.split() if not hasattr(optimizer, name)]
    asked = [name for name in METHODS.split() if hasattr(DeepSpeedZeroOptimizer, name)]
    assert asked == METHODS.split() or deepspeed.__version__ < "0.19.5"
    if not HAS_TORCH_STYLE:
        asked.remove("backward_prologue")  # called by stock's optimizer itself
    missing += [name for name in asked if not callable(getattr(optimizer, name, None))]
    _adagrad_equals_torch()
    deepspeed_ext.shutdown()
    return missing


def test_contract_with_deepspeeds_engine() -> None:
    assert run_distributed(_contract, 1) == [[]]
