"""Every optimizer at layouts of two and four ranks: weights, losses and norms after three steps equal one process's.

Schedule-free ones are compared at both points, Sophia with estimates on the same sequences, and a skipped step is taken
in between, in which nothing may change. Two ranks save a checkpoint; the same ranks resume it bit by bit, and one
process goes on from it as from its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.checks import check
from megatron.optimus.config.schema import (
    LoggingConfig,
    LRDecayStyle,
    OptimizerConfig,
    OptimizerName,
    TokenDispatcherType,
)
from megatron.optimus.context import RunContext
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from tests.distributed.layouts import BATCH, LENGTH, deviation, part_of
from tests.distributed.test_training_layouts import micro_batch
from tests.distributed.training_cases import PP2, SEQUENCES, SMALL_BUCKETS, STEPS, Case, run_config
from tests.helpers import run_distributed

LR, MODEL = 3e-3, "moe, tied"
# Large eps: an update must not hang on the sign of a gradient that is smaller than rounding.
CONSTANT: dict[str, Any] = dict(lr_decay_style=LRDecayStyle.CONSTANT, schedule_free_warmup_iters=2)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {},
    "adopt": dict(adopt_eps=1e-2, adopt_beta2=0.95),
    "ademamix": dict(ademamix_warmup_iters=2),
    "cautious-adamw": {},
    "lamb": {},
    "lars": dict(lr=0.1, lars_trust_coefficient=0.1),
    "mars": dict(clip_grad=0.0, mars_gamma=1.0),  # so that its norms exceed 1
    "pytorch_optimizer:AdaBelief": dict(optimizer_options=["eps=1e-2", "rectify=false"]),
    "schedule-free-adamw": CONSTANT,
    "schedule-free-sgd": CONSTANT | dict(lr=0.1),
    "sophia": dict(sophia_interval=2, sophia_batch_size=SEQUENCES, sophia_gamma=2.0),
}
LAYOUTS: dict[int, dict[str, Case]] = {
    2: {"ep 2, zero 2": Case(dict(expert_model_parallel_size=2), MODEL, SMALL_BUCKETS | dict(zero_stage=2))},
    4: {
        "tp 2 x dp 2, ep 2 x etp 2": Case(
            dict(
                tensor_model_parallel_size=2,
                expert_model_parallel_size=2,
                expert_tensor_parallel_size=2,
                moe_token_dispatcher_type=TokenDispatcherType.ALLTOALL,
            ),
            MODEL,
            SMALL_BUCKETS,
        ),
        "pp 2 x cp 2, ep 2, tied": Case(
            PP2 | dict(context_parallel_size=2, expert_model_parallel_size=2), MODEL, SMALL_BUCKETS
        ),
    },
}


def optimizers_at(layout: str) -> list[str]:
    """Pipeline stages differ in what they send and in the tied weight: there one of each kind will do."""
    return ["adafactor", "lamb", "schedule-free-adamw", "sophia"] if layout.startswith("pp") else list(OPTIMIZERS)


Trained = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


class Training:
    """The model, its optimizer and its data on one rank."""

    def __init__(self, rank: int, world: int, case: Case, name: str, folder: str = "") -> None:
        from megatron.optimus.training.engine import build_engine, build_model
        from megatron.optimus.training.pipeline_schedule import build_schedule

        config = run_config(case)
        options = dict(lr=LR, min_lr=0.0, adam_eps=1e-2, clip_grad=0.5, **case.optimizer) | OPTIMIZERS[name]
        optimizer, place = (
            OptimizerConfig(optimizer=OptimizerName(name), **options),
            LoggingConfig(run_dir=folder or "unused"),
        )
        self.config, self.case = replace(config, optimizer=optimizer, logging=place), case
        check(self.config, world)
        self.mesh = Mesh(config.parallel, rank=rank, world_size=world)
        self.run = RunContext.of(self.config, self.mesh, torch.device("cpu"))
        self.model = build_model(self.run)
        self.engine = build_engine(self.run, self.model)
        for group in self.engine.optimizer.param_groups:
            if not isinstance(group.get("eps"), tuple):
                group["eps"] = max(group.get("eps", 0.0), 1e-2)
        self.schedule, self.recorder = build_schedule(self.run, self.engine), Recorder(self.run.ranks)
        self.folder = folder

    @cached_property
    def checkpoints(self) -> Any:
        """Made when it is first asked for: a folder of checkpoints serves one at a time."""
        from megatron.optimus.training.checkpointing import Checkpoints

        return Checkpoints(self.run, self.model, self.engine)

    def batches(self, step: int) -> list[Any]:
        from megatron.optimus.training.data import context_parallel_slice

        positions, dp = own_positions(LENGTH, self.config.parallel, self.mesh), self.mesh.size("dp")
        numbers = [step * 100 + micro * dp + self.mesh.index("dp") for micro in range(SEQUENCES // BATCH // dp)]
        return [context_parallel_slice(micro_batch(number, self.case), positions) for number in numbers]

    def step(self, step: int) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether the step was skipped."""
        from megatron.optimus.training.curvature import estimate_curvature, is_due
        from megatron.optimus.training.trainer import train_step

        batches = self.batches(step)
        if is_due(self.config, step):
            estimate_curvature(self.run, self.engine, self.schedule, batches, step)
        report = train_step(self.run, self.engine, self.schedule, self.recorder, batches).read()
        return report.metrics["loss"], report.grad_norm, report.skipped

    def validation_loss(self) -> float:
        from megatron.optimus.training.evaluate import set_loss

        return set_loss(self.run, self.schedule, [self.batches(STEPS)]).loss

    def weights(self) -> dict[str, Tensor]:
        """Copies of this rank's parameters, with the marks by which a part is found."""
        self.engine.optimizer.wait_for_params()
        found = {key: weight.detach().clone() for key, weight in self.model.named_parameters()}
        for key, weight in self.model.named_parameters():
            found[key].__dict__.update(weight.__dict__)
        return found


def train(training: Training, name: str) -> Trained:
    """Losses and norms; the parameters of this rank in training, and where they are evaluated."""
    lines, optimizer = list[float](), training.engine.optimizer
    for step in range(STEPS):
        if step == 1:
            before = _everything(training.engine)
            optimizer.skip_above = 1e-9
            assert training.step(1)[2]
            optimizer.skip_above = float("inf")
            assert _are_equal(before, _everything(training.engine)), name
        loss, norm, skipped = training.step(step)
        assert not skipped
        lines += [loss, norm]
    trained = training.weights()
    lines.append(training.validation_loss())
    assert _are_equal(trained.values(), training.weights().values()), "switching is exact"
    with optimizer.averaged_parameters():
        evaluated = {key: weight.clone() for key, weight in training.weights().items()}
    return torch.tensor(lines, dtype=torch.float64), trained, evaluated


def check_resumption(training: Training, again: Training, validation_loss: float) -> None:
    """Saves what has been trained, has ``again`` load it, and goes on with both."""
    training.checkpoints.after_step(STEPS, STEPS * SEQUENCES, is_exiting=True)
    training.checkpoints.close()
    training.step(STEPS)
    assert again.checkpoints.resume() == (STEPS, STEPS * SEQUENCES)
    assert again.validation_loss() == validation_loss
    again.step(STEPS)
    assert _are_equal(_everything(training.engine), _everything(again.engine)), "resumes bit by bit"
    again.checkpoints.close()


def _are_equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _everything(engine: Any) -> list[Tensor]:
    """Copies of the masters, states and parameters of this rank, without padding."""
    optimizer = engine.optimizer
    shards = [*optimizer.state_shards(), *optimizer.tensor_states(all_copies=True)]
    kept = [tensor.clone() for shard in shards for tensor in shard.tensors.values()]
    return kept + [param.detach().clone() for param in engine.module.parameters()]


def _init() -> None:
    from megatron.optimus.training.engine import init_engine

    init_engine(timedelta(seconds=60))


def serial(rank: int, world: int) -> dict[str, Trained]:
    """What three steps give, by name, and what the fourth one makes of it, by "name, next"."""
    _init()
    found = {}
    for name in OPTIMIZERS:
        training = Training(rank, world, Case({}, MODEL), name)
        lines, trained, evaluated = train(training, name)
        found[name] = lines, {key: weight.clone() for key, weight in trained.items()}, evaluated  # without marks
        row = torch.tensor(training.step(STEPS)[:2], dtype=torch.float64)
        found[f"{name}, next"] = row, {key: weight.clone() for key, weight in training.weights().items()}, {}
    return found


def compared(rank: int, world: int, pickled: bytes, folder: str) -> dict[tuple[str, str], dict[str, float]]:
    _init()
    expected: dict[str, Trained] = pickle.loads(pickled)
    found = {}
    for layout, case in LAYOUTS[world].items():
        for name in optimizers_at(layout):
            training = Training(rank, world, case, name, f"{folder}/{name}" if world == 2 else "")
            lines, trained, evaluated = train(training, name)
            if world == 2:
                check_resumption(training, Training(rank, world, case, name, f"{folder}/{name}"), lines[-1].item())
            wanted_lines, wanted, wanted_evaluated = expected[name]
            each = {key: deviation(weight, part_of(wanted[key], weight)) for key, weight in trained.items()}
            for key, weight in evaluated.items():
                each[f"evaluated {key}"] = deviation(weight, part_of(wanted_evaluated[key], trained[key]))
            found[layout, name] = each | {"lines": deviation(lines, wanted_lines, each=True)}
    return found


def resumed(rank: int, world: int, pickled: bytes, folder: str) -> dict[str, dict[str, float]]:
    """One process goes on from what two have saved."""
    _init()
    expected: dict[str, Trained] = pickle.loads(pickled)
    found = {}
    for name in OPTIMIZERS:
        training = Training(rank, world, Case({}, MODEL), name, f"{folder}/{name}")
        training.checkpoints.resume()
        row = torch.tensor(training.step(STEPS)[:2], dtype=torch.float64)
        wanted_row, wanted, _ = expected[f"{name}, next"]
        found[name] = {key: deviation(weight, wanted[key]) for key, weight in training.weights().items()}
        found[name]["lines"] = deviation(row, wanted_row, each=True)
        training.checkpoints.close()
    return found


@dataclass
class Measured:
    by_ranks: dict[int, list[dict[tuple[str, str], dict[str, float]]]]
    resumed: dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    [expected] = run_distributed(serial, 1, timeout=300)
    for name in OPTIMIZERS:
        _, weights, evaluated = expected[name]
        differs = any(not torch.equal(weights[key], evaluated[key]) for key in weights)
        assert differs == name.startswith("schedule-free"), name
    assert len({expected[name][0][-1].item() for name in OPTIMIZERS}) == len(OPTIMIZERS), "each is another one"
    pickled = pickle.dumps(expected)
    by_ranks = {ranks: run_distributed(compared, ranks, pickled, folder, timeout=400) for ranks in LAYOUTS}
    [one] = run_distributed(resumed, 1, pickled, folder, timeout=300)
    return Measured(by_ranks, one)


def assert_equal(found: dict[str, float]) -> None:
    assert found.pop("lines") <= 1e-5
    assert {key: value for key, value in found.items() if not value <= 1e-5} == {}


@pytest.mark.parametrize(
    ("ranks", "layout", "name"),
    [(ranks, layout, name) for ranks, cases in LAYOUTS.items() for layout in cases for name in optimizers_at(layout)],
)
def test_three_steps_equal_one_process(measured: Measured, ranks: int, layout: str, name: str) -> None:
    for result in measured.by_ranks[ranks]:
        assert_equal(dict(result[layout, name]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(measured: Measured, name: str) -> None:
    assert_equal(dict(measured.resumed[name]))
