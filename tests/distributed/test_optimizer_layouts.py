"""Every optimizer at layouts of two and four ranks: weights, losses and norms after three steps equal one process's.

Schedule-free ones are compared at both points, Sophia with estimates on the same sequences, and a skipped step is taken
in between, in which nothing may change.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.checks import check
from megatron.optimus.config.schema import LRDecayStyle, OptimizerConfig, OptimizerName, TokenDispatcherType
from megatron.optimus.context import RunContext
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from tests.distributed.layouts import BATCH, LENGTH, deviation, part_of
from tests.distributed.test_training_layouts import micro_batch
from tests.distributed.training_cases import PP2, SEQUENCES, SMALL_BUCKETS, STEPS, Case, run_config
from tests.helpers import run_distributed

LR = 3e-3
# Large eps: an update must not hang on the sign of a gradient that is smaller than rounding.
CONSTANT: dict[str, Any] = dict(lr_decay_style=LRDecayStyle.CONSTANT, schedule_free_warmup_iters=2)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adopt": dict(adopt_eps=1e-2, adopt_beta2=0.95),
    "ademamix": dict(ademamix_warmup_iters=2),
    "cautious-adamw": {},
    "lamb": {},
    "lars": dict(lr=0.1, lars_trust_coefficient=0.1),
    "mars": {},
    "pytorch_optimizer:AdaBelief": dict(optimizer_options=["eps=1e-2", "rectify=false"]),
    "schedule-free-adamw": CONSTANT,
    "schedule-free-sgd": CONSTANT | dict(lr=0.1),
    "sophia": dict(sophia_interval=2, sophia_batch_size=SEQUENCES, sophia_gamma=2.0),
}
LAYOUTS: dict[int, dict[str, Case]] = {
    2: {"ep 2, zero 2": Case(dict(expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS | dict(zero_stage=2))},
    4: {
        "tp 2 x dp 2, ep 2 x etp 2": Case(
            dict(
                tensor_model_parallel_size=2,
                expert_model_parallel_size=2,
                expert_tensor_parallel_size=2,
                moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
            ),
            "moe, tied",
            SMALL_BUCKETS,
        ),
        "pp 2 x cp 2, ep 2, tied": Case(
            PP2 | dict(context_parallel_size=2, expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS
        ),
    },
}
MODELS = sorted({case.model for cases in LAYOUTS.values() for case in cases.values()})
Trained = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


def train(rank: int, world: int, case: Case, name: str) -> Trained:
    """Losses and norms; the parameters of this rank in training, and where they are evaluated."""
    from megatron.optimus.training.curvature import estimate_curvature, is_due
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import build_engine, build_model
    from megatron.optimus.training.evaluate import validation_loss
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    config = run_config(case)
    options = dict(lr=LR, min_lr=0.0, adam_eps=1e-2, clip_grad=0.5, **case.optimizer) | OPTIMIZERS[name]
    config = replace(config, optimizer=OptimizerConfig(optimizer=OptimizerName(name), **options))
    check(config, world)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, torch.device("cpu"))
    model = build_model(run)
    positions = own_positions(LENGTH, config.parallel, mesh)
    accumulation = SEQUENCES // BATCH // mesh.size("dp")
    engine = build_engine(run, model)
    for group in engine.optimizer.param_groups:
        group["eps"] = max(group.get("eps", 0.0), 1e-2)
    schedule = build_schedule(run, engine)

    def own_batches(step: int) -> list[Any]:
        numbers = [step * 100 + micro * mesh.size("dp") + mesh.index("dp") for micro in range(accumulation)]
        return [context_parallel_slice(micro_batch(number, case), positions) for number in numbers]

    recorder, lines = Recorder(run.ranks), list[float]()
    for step in range(STEPS):
        batches = own_batches(step)
        if is_due(config, step):
            estimate_curvature(run, engine, schedule, batches, step)
        if step == 1:
            before = _everything(engine)
            engine.optimizer.skip_above = 1e-9
            assert train_step(run, engine, schedule, recorder, batches).read().skipped
            engine.optimizer.skip_above = float("inf")
            assert all(torch.equal(a, b) for a, b in zip(before, _everything(engine), strict=True)), name
        report = train_step(run, engine, schedule, recorder, batches).read()
        assert not report.skipped
        lines += [report.metrics["loss"], report.grad_norm]
    engine.optimizer.wait_for_params()
    trained = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    lines.append(validation_loss(run, schedule, [own_batches(STEPS)]))
    assert all(torch.equal(weight, trained[key]) for key, weight in model.named_parameters()), "switching is exact"
    with engine.optimizer.averaged_parameters():
        evaluated = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    for key, weight in model.named_parameters():  # the marks by which a part is found
        trained[key].__dict__.update(weight.__dict__)
    return torch.tensor(lines, dtype=torch.float64), trained, evaluated


def _everything(engine: Any) -> list[Tensor]:
    """Copies of the masters, states and parameters of this rank."""
    engine.optimizer.wait_for_params()
    shards = [bucket.shard for flat_buffer in engine.optimizer.flat_buffers for bucket in flat_buffer.buckets]
    return [tensor.clone() for shard in shards for tensor in (shard.master, shard.param, *shard.state.values())]


def _init() -> None:
    from megatron.optimus.training.engine import init_engine

    init_engine(timedelta(seconds=60))


def serial(rank: int, world: int) -> dict[tuple[str, str], Trained]:
    _init()
    found = {}
    for model in MODELS:
        for name in OPTIMIZERS:
            lines, trained, evaluated = train(rank, world, Case({}, model), name)
            found[model, name] = lines, {key: weight.clone() for key, weight in trained.items()}, evaluated  # no marks
    return found


def compared(rank: int, world: int, pickled: bytes) -> dict[tuple[str, str], dict[str, float]]:
    _init()
    expected: dict[tuple[str, str], Trained] = pickle.loads(pickled)
    found = {}
    for layout, case in LAYOUTS[world].items():
        for name in OPTIMIZERS:
            lines, trained, evaluated = train(rank, world, case, name)
            wanted_lines, wanted, wanted_evaluated = expected[case.model, name]
            each = {key: deviation(weight, part_of(wanted[key], weight)) for key, weight in trained.items()}
            for key, weight in evaluated.items():
                each[f"evaluated {key}"] = deviation(weight, part_of(wanted_evaluated[key], trained[key]))
            found[layout, name] = each | {"lines": deviation(lines, wanted_lines, each=True)}
    return found


@pytest.fixture(scope="module")
def measured() -> dict[int, list[dict[tuple[str, str], dict[str, float]]]]:
    [expected] = run_distributed(serial, 1, timeout=300)
    for model in MODELS:
        trained = {name: expected[model, name] for name in OPTIMIZERS}
        for name, (_, weights, evaluated) in trained.items():
            differs = any(not torch.equal(weights[key], evaluated[key]) for key in weights)
            assert differs == name.startswith("schedule-free"), name
        losses = {lines[-1].item() for lines, _, _ in trained.values()}
        assert len(losses) == len(OPTIMIZERS), "every optimizer is another one"
    pickled = pickle.dumps(expected)
    return {ranks: run_distributed(compared, ranks, pickled, timeout=400) for ranks in LAYOUTS}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "layout"), [(ranks, layout) for ranks, cases in LAYOUTS.items() for layout in cases])
def test_three_steps_equal_one_process(
    measured: dict[int, list[dict[tuple[str, str], dict[str, float]]]], ranks: int, layout: str, name: str
) -> None:
    for rank, result in enumerate(measured[ranks]):
        found = dict(result[layout, name])
        assert found.pop("lines") <= 1e-5, rank
        assert {key: value for key, value in found.items() if not value <= 1e-5} == {}, rank
