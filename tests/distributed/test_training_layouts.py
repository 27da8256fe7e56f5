"""Three optimizer steps at a layout equal those of one process: losses, gradient norm, and every weight (fp32).

The layouts add expert gradients to the optimizer's buffers as they are computed; the one process does not.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.schema import (
    ContextCommunication,
    LoadBalancing,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Recompute,
    RunConfig,
    TokenDispatcher,
    TrainingConfig,
)
from megatron.optimus.data.loader import Batch
from megatron.optimus.ops import main_grad_of
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.parallel.mesh import Mesh
from tests.distributed.layouts import BATCH, LENGTH, batch_of, deviation, model_config, part_of
from tests.helpers import run_distributed

STEPS, SEQUENCES = 3, 8  # of the global batch
MODEL = dict(
    num_experts=8,
    moe_z_loss_coeff=0.1,
    moe_router_load_balancing_type=LoadBalancing.AUX_LOSS,  # of each micro-batch: the same ones at any layout
    moe_aux_loss_coeff=0.3,
)
CASES: dict[str, dict[str, Any]] = {
    "tp 2 x cp 2 (ring), ep 4, recomputed": dict(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        cp_comm_type=ContextCommunication.P2P,
        expert_model_parallel_size=4,
        recompute_modules=list(Recompute),
    ),
    "tp 2 x dp 2, ep 2 x etp 2": dict(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
    ),
    "cp 2 (ulysses) x dp 2, ep 2": dict(context_parallel_size=2, expert_model_parallel_size=2),
    "tp 4, experts on every rank": dict(tensor_model_parallel_size=4),
}


def run_config(parallel: dict[str, Any]) -> RunConfig:
    return RunConfig(
        model=model_config(MODEL),
        parallel=ParallelConfig(**parallel),
        # eps: an update must not hang on the sign of a gradient that is smaller than rounding
        optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-2, clip_grad=0.5),
        training=TrainingConfig(
            micro_batch_size=BATCH, global_batch_size=SEQUENCES, seq_length=LENGTH, params_dtype=Precision.FP32, seed=3
        ),
    )


def train(rank: int, world: int, parallel: dict[str, Any], *, fuses: bool = True) -> tuple[Tensor, dict[str, Any]]:
    """(loss, auxiliary loss, z-loss, gradient norm) of each step; the parameters afterwards."""
    from megatron.optimus.trainer.build import build_model  # they import deepspeed
    from megatron.optimus.trainer.engine import build_engine
    from megatron.optimus.trainer.schedule import build_schedule
    from megatron.optimus.trainer.step import own_part, train_step

    config = run_config(parallel)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    model = build_model(config, mesh, torch.device("cpu"))
    positions = own_positions(LENGTH, config.parallel, mesh)
    accumulation = SEQUENCES // BATCH // mesh.size("dp")
    engine = build_engine(model, config, mesh, accumulation)
    experts = [p for layer in model.moe_layers() for p in layer.experts.parameters()]
    if not fuses:
        for weight in experts:
            weight.main_grad = None
    schedule = build_schedule(config, engine, mesh, torch.device("cpu"))
    lines = []
    for step in range(STEPS):
        numbers = [step * 100 + micro * mesh.size("dp") + mesh.index("dp") for micro in range(accumulation)]
        batches = [own_part(Batch(*batch_of(number)), positions) for number in numbers]
        report = train_step(engine, schedule, batches, config.model, mesh)
        assert report.dropped_tokens == 0 and not report.skipped
        lines.append([report.loss, report.aux_loss, report.z_loss, report.grad_norm])
        assert all((main_grad_of(weight) is not None) is fuses for weight in experts)  # kept after the first step
    engine.optimizer.sync_params_from_master()
    return torch.tensor(lines, dtype=torch.float64), dict(model.named_parameters())


def serial(rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
    _init()
    lines, weights = train(rank, world, {}, fuses=False)
    return lines, {name: weight.detach().clone() for name, weight in weights.items()}


def compared(rank: int, world: int, lines: Tensor, weights: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    _init()
    found = {}
    for case, parallel in CASES.items():
        own_lines, own = train(rank, world, parallel)
        found[case] = {name: deviation(weight.detach(), part_of(weights[name], weight)) for name, weight in own.items()}
        found[case]["lines"] = deviation(own_lines, lines, each=True)
    return found


def _init() -> None:
    from megatron.optimus.trainer.engine import init_engine

    init_engine(timedelta(seconds=60))


@pytest.fixture(scope="module")
def measured() -> list[dict[str, dict[str, float]]]:
    return run_distributed(compared, 4, *run_distributed(serial, 1)[0])


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_one_process(measured: list[dict[str, dict[str, float]]], case: str) -> None:
    for rank, result in enumerate(measured):
        found = dict(result[case])
        assert found.pop("lines") <= 2e-6, rank
        assert {name: value for name, value in found.items() if not value <= 1e-5} == {}, rank
