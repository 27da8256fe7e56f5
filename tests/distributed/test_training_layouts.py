"""Three optimizer steps and a validation at a layout equal those of one process: reports and every weight (fp32).

The layouts add expert gradients to the optimizer's buffers in the backward (ZeRO stage 1); the one process does not.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.config.checks import check
from megatron.optimus.config.placement import to_json
from megatron.optimus.config.schema import (
    PipelineSchedule,
    RunConfig,
)
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.ops import main_grad_of
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.parallel.pipeline_stages import SPLIT_BACKWARDS
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.metrics import Recorder
from tests.distributed.bucket_launches import check_launches, chunks_of, record_launches
from tests.distributed.layouts import BATCH, LENGTH, deviation, inputs_of, part_of, refusal
from tests.distributed.layouts import Case as LayoutCase
from tests.distributed.training_cases import (
    LAYOUTS,
    MODELS,
    PLACED,
    SEQUENCES,
    SMALL_BUCKETS,
    STEPS,
    Case,
    run_config,
)
from tests.helpers import run_distributed


def micro_batch(number: int, case: Case) -> Batch:
    tokens, labels, documents, positions = inputs_of(number, LayoutCase({}, {}, "documents" in case.model))
    labels[:, -1] = NO_LABEL  # as without the extra token
    num_labels = int((labels != NO_LABEL).sum())
    return Batch(tokens, labels, documents, positions, num_labels, has_equal_label_counts=documents is None)


def train(rank: int, world: int, case: Case, *, fuses: bool = True) -> tuple[Tensor, dict[str, Any]]:
    """All numbers of the steps' reports and the validation loss, in a row; the parameters afterwards."""
    from megatron.optimus.training.data import context_parallel_slice
    from megatron.optimus.training.engine import (
        build_engine,
        build_model,  # they import deepspeed
    )
    from megatron.optimus.training.evaluate import set_loss
    from megatron.optimus.training.pipeline_schedule import build_schedule
    from megatron.optimus.training.trainer import train_step

    config = run_config(case)
    check(config, world)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    run = RunContext.of(config, mesh, torch.device("cpu"))
    model = build_model(run)
    positions = own_positions(LENGTH, config.parallel, mesh)
    accumulation = SEQUENCES // BATCH // mesh.size("dp")
    engine = build_engine(run, model)
    schedule = build_schedule(run, engine)
    experts = [weight for layer in model.moe_layers() for weight in layer.experts.parameters()]
    fuses = fuses and config.optimizer.zero_stage == 1
    additions = _count_additions(experts, fuses=fuses)

    def own_batches(step: int) -> list[Batch]:
        numbers = [step * 100 + micro * mesh.size("dp") + mesh.index("dp") for micro in range(accumulation)]
        return [context_parallel_slice(micro_batch(number, case), positions) for number in numbers]

    recorder, lines = Recorder(run.ranks), list[float]()
    buckets, sent = engine.optimizer._reducer.buckets, [0]
    for bucket in buckets:
        bucket.start_reduce = _counted(bucket.start_reduce, sent, 0)  # type: ignore[method-assign]
    listens = config.parallel.virtual_pipeline_model_parallel_size > 1 and case.optimizer == SMALL_BUCKETS
    events = record_launches(schedule, buckets) if listens else []
    for step in range(STEPS):
        for weight in experts if fuses else ():  # what a first gradient is written over
            if weight.main_grad is not None:
                weight.main_grad.fill_(torch.nan)
        report = train_step(run, engine, schedule, recorder, own_batches(step)).read()
        metrics = report.metrics
        assert metrics.get("dropped_tokens", 0) == 0 and not report.skipped
        lines += [metrics["loss"], metrics.get("aux_loss", 0.0), metrics.get("z_loss", 0.0), report.grad_norm]
        lines.append(metrics.get("router_entropy", 0.0))
        lines += [slots for load in report.expert_load_LE for slots in load]
        # Where weight gradients are computed apart they take the ordinary way.
        if config.parallel.pipeline_schedule not in SPLIT_BACKWARDS:
            assert all((main_grad_of(weight) is not None) is fuses for weight in experts)
            parts = config.parallel.moe_dispatch_chunks
            assert additions == [(step + 1) * accumulation * parts * fuses] * len(experts), additions
    assert sent == [STEPS * _reductions_of_a_step(engine, schedule, config, accumulation)]
    if listens:
        check_launches(events, schedule, engine, mesh)
    lines.append(set_loss(run, schedule, [own_batches(STEPS)]).loss)
    engine.optimizer.sync_params_from_master()
    for parameter in model.parameters():
        if getattr(parameter, "pipe_tied", False):  # the copies of two stages have the same bits
            other = parameter.detach().clone()
            dist.broadcast(other, group=mesh.group("pp"), group_src=0)
            assert torch.equal(other, parameter)
    return torch.tensor(lines, dtype=torch.float64), dict(model.named_parameters())


def _count_additions(experts: list[Any], *, fuses: bool) -> list[int]:
    """Into the optimizer's buffers, by backwards, for each weight; none where the ordinary way is asked for."""
    additions = [0] * len(experts)
    for index, weight in enumerate(experts):
        if fuses:
            weight.main_grad_ready = _counted(weight.main_grad_ready, additions, index)
        else:
            weight.main_grad = None
    return additions


def _reductions_of_a_step(engine: Any, schedule: Any, config: RunConfig, accumulation: int) -> int:
    """With ZeRO stage 2 every micro-batch is reduced, but of several chunks no bucket that the backward does not
    reach."""
    num_buckets = len(engine.optimizer._reducer.buckets)
    if config.optimizer.zero_stage != 2:
        return num_buckets
    chunks = chunks_of(schedule)
    reached = accumulation * sum(len(engine.optimizer.buckets_of(chunk.parameters())) for chunk in chunks)
    assert len(chunks) == 1 or reached < accumulation * num_buckets * len(chunks)
    return reached


def _counted(ready: Callable[[], None], counts: list[int], index: int) -> Callable[[], None]:
    def count() -> None:
        counts[index] += 1
        ready()

    return count


Trained = tuple[Tensor, dict[str, Tensor]]


def serial(rank: int, world: int) -> dict[str, Trained]:
    _init()
    found = {}
    for model in MODELS:
        lines, weights = train(rank, world, Case({}, model), fuses=False)
        found[model] = lines, {name: weight.detach().clone() for name, weight in weights.items()}
    torch.testing.assert_close(found["dense, tied"][0][[0, 3]], by_hand(Case({}, "dense, tied")), rtol=1e-5, atol=0)
    return found


def by_hand(case: Case) -> Tensor:
    """Loss and gradient norm of the first step in plain PyTorch: of the mean over the labels that exist."""
    from megatron.optimus.training.engine import build_model

    config = run_config(case)
    model = build_model(RunContext.of(config, Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu")))
    batches = [micro_batch(number, case) for number in range(SEQUENCES // BATCH)]
    logits_TV = torch.cat([model(batch.tokens_BS).logits_BSV.flatten(0, 1) for batch in batches])
    labels_T = torch.cat([batch.labels_BS.flatten() for batch in batches])
    exists_T = labels_T != NO_LABEL
    assert int(exists_T.sum()) == SEQUENCES * (LENGTH - 1)
    loss = F.cross_entropy(logits_TV[exists_T].double(), labels_T[exists_T])
    z_loss = logits_TV[exists_T].double().logsumexp(-1).square().mean()  # in gradients only
    (loss + config.model.output_z_loss_coeff * z_loss).backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([loss.detach(), torch.stack(norms).norm().double()])


def compared(rank: int, world: int, pickled: bytes, placement: str) -> dict[str, dict[str, float]]:
    """``pickled``: what ``serial`` gave; as tensors it would cross to a process with an open file for each."""
    _init()
    expected: dict[str, Trained] = pickle.loads(pickled)
    found = {}
    for name, case in LAYOUTS[world].items():
        if _refusal(case):
            continue
        options = {option: placement if value == PLACED else value for option, value in case.parallel.items()}
        own_lines, own = train(rank, world, case._replace(parallel=options))
        lines, weights = expected[case.model]
        found[name] = {key: deviation(weight.detach(), part_of(weights[key], weight)) for key, weight in own.items()}
        found[name]["lines"] = deviation(own_lines, lines, each=True)
    return found


def _refusal(case: Case) -> str | None:
    return refusal(case.parallel.get("pipeline_schedule", PipelineSchedule.ONE_F_ONE_B))


def _init() -> None:
    from megatron.optimus.training.engine import init_engine

    init_engine(timedelta(seconds=60))


def measure(folder: Path) -> dict[int, list[dict[str, dict[str, float]]]]:
    """Number of ranks -> of each: case -> deviation of all reported numbers ("lines") and of every weight."""
    placement = folder / "placement.json"
    placement.write_text(to_json([((5, 0), (1, 7), (6, 2), (3, 4)), ((7, 6), (0, 3), (5, 1), (4, 2))]))
    [expected] = run_distributed(serial, 1)
    return {ranks: run_distributed(compared, ranks, pickle.dumps(expected), str(placement)) for ranks in LAYOUTS}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, float]]]]:
    return measure(tmp_path_factory.mktemp("placement"))


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in LAYOUTS.items() for case in cases])
def test_three_steps_equal_one_process(
    measured: dict[int, list[dict[str, dict[str, float]]]], ranks: int, case: str
) -> None:
    if reason := _refusal(LAYOUTS[ranks][case]):
        pytest.skip(reason)
    for rank, result in enumerate(measured[ranks]):
        found = dict(result[case])
        assert found.pop("lines") <= 2e-6, rank
        assert {name: value for name, value in found.items() if not value <= 1e-5} == {}, rank
