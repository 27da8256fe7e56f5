"""Three optimizer steps and a validation at a layout equal those of one process: reports and every weight (fp32).

The layouts add expert gradients to the optimizer's buffers in the backward (ZeRO stage 1); the one process does not.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.config.checks import check
from megatron.optimus.config.placement import to_json
from megatron.optimus.config.schema import (
    ContextCommunication,
    LoadBalancing,
    OptimizerConfig,
    ParallelConfig,
    PipelineSchedule,
    Precision,
    Recompute,
    RunConfig,
    TokenDispatcher,
    TrainingConfig,
)
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers.labels import NO_LABEL
from megatron.optimus.ops import main_grad_of
from megatron.optimus.parallel.context import own_positions
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.parallel.pipeline import SPLIT_BACKWARDS
from tests.distributed.layouts import BATCH, LENGTH, deviation, inputs_of, model_config, part_of, refusal
from tests.distributed.layouts import Case as LayoutCase
from tests.helpers import run_distributed

STEPS, SEQUENCES = 3, 8  # of the global batch
PLACED = "its name is put here by the test"


class Case(NamedTuple):
    parallel: dict[str, Any]
    model: str = "moe"
    optimizer: Mapping[str, Any] = MappingProxyType({})


MOE = dict(
    num_experts=8,
    moe_z_loss_coeff=0.1,
    moe_router_load_balancing_type=LoadBalancing.AUX_LOSS,  # of each micro-batch: the same ones at any layout
    moe_aux_loss_coeff=0.3,
)
SHARED = MOE | dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True, add_qkv_bias=True)
TIED = dict(untie_embeddings_and_output_weights=False)
MODELS = {
    "moe": MOE,
    "moe, documents": MOE,
    "moe, four layers": MOE | dict(num_layers=4),
    "moe, shared experts": SHARED,
    "moe, shared experts, four layers": SHARED | dict(num_layers=4),
    "moe, tied": MOE | TIED,
    "moe, four layers, tied": MOE | TIED | dict(num_layers=4),
    "dense, tied": TIED,
}
PP2 = dict(pipeline_model_parallel_size=2)
CHUNKS = PP2 | dict(virtual_pipeline_model_parallel_size=2)
SMALL_BUCKETS = dict(ddp_bucket_size=500)  # so that many are under way when the last backward ends
CASES = {
    "tp 2 x cp 2 (ring), ep 4, recomputed": Case(
        dict(
            tensor_model_parallel_size=2,
            context_parallel_size=2,
            cp_comm_type=ContextCommunication.P2P,
            expert_model_parallel_size=4,
            recompute_modules=list(Recompute),
        )
    ),
    "tp 2 x dp 2, ep 2 x etp 2": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
            moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
        )
    ),
    "cp 2 (ulysses) x dp 2, ep 2": Case(dict(context_parallel_size=2, expert_model_parallel_size=2)),
    "ep 4, hierarchical over nodes of 2, experts placed by a file": Case(
        dict(
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcher.HIERARCHICAL,
            moe_hierarchical_node_size=2,
            moe_expert_placement_file=PLACED,
        )
    ),
    "ep 4, all-to-all in 2 parts, recomputed": Case(
        dict(
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
            moe_dispatch_chunks=2,
            recompute_modules=list(Recompute),
        ),
        optimizer=SMALL_BUCKETS,
    ),
    "dp 4, ep 2, the transport chosen by a probe": Case(
        dict(expert_model_parallel_size=2, moe_token_dispatcher_type=TokenDispatcher.AUTO)
    ),
    "tp 4, experts on every rank": Case(dict(tensor_model_parallel_size=4)),
    "pp 2 x dp 2, ep 2": Case(PP2 | dict(expert_model_parallel_size=2), optimizer=SMALL_BUCKETS),
    "pp 2 x dp 2, ep 2, zero 2": Case(
        PP2 | dict(expert_model_parallel_size=2), optimizer=SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 x dp 2, ep 2, zero bubble, recomputed": Case(
        PP2
        | dict(
            virtual_pipeline_model_parallel_size=2,
            pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
            expert_model_parallel_size=2,
            recompute_modules=list(Recompute),
        ),
        "moe, four layers",
        SMALL_BUCKETS,
    ),
    "tp 2 x dp 2, ep 4, all-to-all, shared experts": Case(
        dict(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
        ),
        "moe, shared experts",
        SMALL_BUCKETS,
    ),
    "pp 2 x dp 2, ep 2, zero 2, shared experts": Case(
        PP2 | dict(expert_model_parallel_size=2), "moe, shared experts", SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 zero bubble x tp 2, ep 2, shared experts, recomputed": Case(
        CHUNKS
        | dict(
            pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            recompute_modules=list(Recompute),
        ),
        "moe, shared experts, four layers",
    ),
    "pp 2 interleaved x dp 2, ep 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B, expert_model_parallel_size=2),
        "moe, four layers",
        SMALL_BUCKETS,
    ),
    "pp 2 interleaved x dp 2, ep 2, zero 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B, expert_model_parallel_size=2),
        "moe, four layers",
        SMALL_BUCKETS | dict(zero_stage=2),
    ),
    "pp 2 zero bubble x dp 2, tied, zero 2": Case(
        CHUNKS | dict(pipeline_schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE),
        "moe, four layers, tied",
        dict(zero_stage=2, ddp_bucket_size=3000),
    ),
    "pp 2 x dp 2, documents": Case(PP2, "moe, documents"),
    "pp 2 x cp 2 (ring), documents, ep 2": Case(
        PP2 | dict(context_parallel_size=2, cp_comm_type=ContextCommunication.P2P, expert_model_parallel_size=2),
        "moe, documents",
    ),
    "pp 2 x dp 2, ep 2, tied": Case(PP2 | dict(expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS),
    "pp 2 x dp 2, ep 2, tied, zero 2": Case(
        PP2 | dict(expert_model_parallel_size=2), "moe, tied", SMALL_BUCKETS | dict(zero_stage=2)
    ),
    "pp 2 x tp 2, tied": Case(PP2 | dict(tensor_model_parallel_size=2), "dense, tied"),
}

EIGHT = {
    "tp 2 x pp 2 x dp 2, ep 4, shared experts": Case(
        PP2 | dict(tensor_model_parallel_size=2, expert_model_parallel_size=4), "moe, shared experts", SMALL_BUCKETS
    ),
    "tp 2 x pp 2 x dp 2, ep 4": Case(
        PP2 | dict(tensor_model_parallel_size=2, expert_model_parallel_size=4), optimizer=SMALL_BUCKETS
    ),
    "pp 2 interleaved x cp 2 (ulysses) x dp 2, ep 4, all-to-all, recomputed": Case(
        PP2
        | dict(
            pipeline_schedule=PipelineSchedule.INTERLEAVED_1F1B,
            virtual_pipeline_model_parallel_size=2,
            context_parallel_size=2,
            expert_model_parallel_size=4,
            moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
            recompute_modules=list(Recompute),
        ),
        "moe, four layers",
    ),
}
LAYOUTS = {4: CASES, 8: EIGHT}


def run_config(case: Case) -> RunConfig:
    return RunConfig(
        model=model_config(MODELS[case.model]),
        parallel=ParallelConfig(**case.parallel),
        # eps: an update must not hang on the sign of a gradient that is smaller than rounding
        optimizer=OptimizerConfig(lr=3e-3, adam_eps=1e-2, clip_grad=0.5, **case.optimizer),
        training=TrainingConfig(
            micro_batch_size=BATCH, global_batch_size=SEQUENCES, seq_length=LENGTH, params_dtype=Precision.FP32, seed=3
        ),
    )


def micro_batch(number: int, case: Case) -> Batch:
    tokens, labels, documents, positions = inputs_of(number, LayoutCase({}, {}, "documents" in case.model))
    labels[:, -1] = NO_LABEL  # as without the extra token
    num_labels = int((labels != NO_LABEL).sum())
    return Batch(tokens, labels, documents, positions, num_labels, is_same=documents is None)


def train(rank: int, world: int, case: Case, *, fuses: bool = True) -> tuple[Tensor, dict[str, Any]]:
    """All numbers of the steps' reports and the validation loss, in a row; the parameters afterwards."""
    from megatron.optimus.trainer.build import build_model  # they import deepspeed
    from megatron.optimus.trainer.engine import build_engine
    from megatron.optimus.trainer.schedule import build_schedule
    from megatron.optimus.trainer.step import own_part, train_step, validation_loss

    config = run_config(case)
    check(config, world)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    model = build_model(config, mesh, torch.device("cpu"))
    positions = own_positions(LENGTH, config.parallel, mesh)
    accumulation = SEQUENCES // BATCH // mesh.size("dp")
    engine = build_engine(model, config, mesh, accumulation)
    schedule = build_schedule(config, engine, mesh, torch.device("cpu"))
    experts = [weight for layer in model.moe_layers() for weight in layer.experts.parameters()]
    fuses = fuses and config.optimizer.zero_stage == 1
    additions = [0] * len(experts)  # into the optimizer's buffers, by backwards
    for index, weight in enumerate(experts):
        if fuses:
            weight.main_grad_ready = _counted(weight.main_grad_ready, additions, index)  # type: ignore[attr-defined]
        else:
            weight.main_grad = None  # type: ignore[attr-defined]

    def own_batches(step: int) -> list[Batch]:
        numbers = [step * 100 + micro * mesh.size("dp") + mesh.index("dp") for micro in range(accumulation)]
        return [own_part(micro_batch(number, case), positions) for number in numbers]

    lines: list[float] = []
    buckets, sent = engine.optimizer._sync.buckets, [0]
    for bucket in buckets:
        bucket.start_reduce = _counted(bucket.start_reduce, sent, 0)  # type: ignore[method-assign]
    listens = config.parallel.virtual_pipeline_model_parallel_size > 1 and case.optimizer == SMALL_BUCKETS
    told = _listen(schedule, buckets) if listens else []
    for step in range(STEPS):
        report = train_step(engine, schedule, own_batches(step), config.model, mesh).read()
        assert report.dropped_tokens == 0 and not report.skipped
        lines += [report.loss, report.aux_loss, report.z_loss, report.grad_norm, report.router_entropy or 0.0]
        lines += [slots for load in report.expert_load_LE for slots in load]
        # Where weight gradients are computed apart they take the ordinary way.
        if config.parallel.pipeline_schedule not in SPLIT_BACKWARDS:
            assert all((main_grad_of(weight) is not None) is fuses for weight in experts)
            parts = config.parallel.moe_dispatch_chunks
            assert additions == [(step + 1) * accumulation * parts * fuses] * len(experts), additions
    # With ZeRO stage 2 every micro-batch is reduced, but of several chunks no bucket that the backward does not reach.
    once = len(buckets)
    if config.optimizer.zero_stage == 2:
        once = accumulation * sum(len(engine.optimizer.buckets_of(chunk.parameters())) for chunk in _chunks(schedule))
        assert len(_chunks(schedule)) == 1 or once < accumulation * len(buckets) * len(_chunks(schedule))
    assert sent == [once * STEPS]
    if listens:
        _check_launches(told, schedule, engine, mesh)
    lines.append(validation_loss(schedule, [own_batches(STEPS)], config.model, mesh))
    engine.optimizer.sync_params_from_master()
    for parameter in model.parameters():
        if getattr(parameter, "pipe_tied", False):  # the copies of two stages have the same bits
            other = parameter.detach().clone()
            dist.broadcast(other, group=mesh.group("pp"), group_src=0)
            assert torch.equal(other, parameter)
    return torch.tensor(lines, dtype=torch.float64), dict(model.named_parameters())


def _chunks(schedule: Any) -> list[torch.nn.Module]:
    return list(schedule.pipeline._chunks.values())


Told = tuple[str, int]  # ("before" or "after", number of a chunk) of its last backward, ("launch", number of a bucket)


def _listen(schedule: Any, buckets: list[Any]) -> list[Told]:
    """What happens from now on, in its order."""
    told: list[Told] = []
    chunks, backwards = _chunks(schedule), schedule.pipeline.backwards
    before, after = backwards.before, backwards.after

    def tell_before(micro_batch: int, chunk: torch.nn.Module, *, is_whole: bool) -> None:
        before(micro_batch, chunk, is_whole=is_whole)
        told.append((f"before {micro_batch}" if is_whole else "inputs", chunks.index(chunk)))

    def tell_after(micro_batch: int, chunk: torch.nn.Module, *, is_whole: bool) -> None:
        told.append((f"after {micro_batch}" if is_whole else "inputs", chunks.index(chunk)))
        after(micro_batch, chunk, is_whole=is_whole)

    def tell_launch(start: Callable[[], None], index: int) -> Callable[[], None]:
        return lambda: (told.append(("launch", index)), start())[1]

    backwards.before, backwards.after = tell_before, tell_after
    for index, bucket in enumerate(buckets):
        bucket.start_reduce = tell_launch(bucket.start_reduce, index)
    return told


def _check_launches(told: list[Told], schedule: Any, engine: Any, mesh: Mesh) -> None:
    """Each chunk's buckets leave in its last backward, while it runs and not when the pipeline is empty; ranks that
    reduce together launch in the same order."""
    orders: list[Any] = [None] * mesh.size("dp")
    dist.all_gather_object(orders, told, group=mesh.group("dp"))
    assert all(order == told for order in orders)
    steps = _in_parts(told, STEPS)
    last = schedule.pipeline.num_micro_batches - 1
    alone = [set(engine.optimizer.buckets_of(chunk.parameters())) for chunk in _chunks(schedule)]
    numbers = {bucket: index for index, bucket in enumerate(engine.optimizer._sync.buckets)}
    hooked = schedule.pipeline._schedule.__class__.__name__ == "ScheduleInterleaved1F1B"
    for step, events in enumerate(steps):
        for chunk, reached in enumerate(alone):
            others = set().union(*(buckets for other, buckets in enumerate(alone) if other != chunk))
            own = {numbers[bucket] for bucket in reached - others}
            began, ended = events.index((f"before {last}", chunk)), events.index((f"after {last}", chunk))
            following = next((i for i in range(ended, len(events)) if events[i][0].startswith("before")), len(events))
            launched = [number for name, number in events[began:following] if name == "launch"]
            assert len(own) > 3 and own <= set(launched), (step, chunk, own, launched)
            early = [number for name, number in events[began:ended] if name == "launch"]
            if step and hooked:  # the zero-bubble schedules compute weights' gradients without hooks
                assert len(early) > len(own) // 2, (step, chunk, own, early)


def _in_parts(told: list[Told], parts: int) -> list[list[Told]]:
    assert len(told) % parts == 0, "every step is the same"
    length = len(told) // parts
    return [told[start : start + length] for start in range(0, len(told), length)]


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
    from megatron.optimus.trainer.build import build_model

    config = run_config(case)
    model = build_model(config, Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu"))
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
    from megatron.optimus.trainer.engine import init_engine

    init_engine(timedelta(seconds=60))


def measure(folder: Path) -> dict[int, list[dict[str, dict[str, float]]]]:
    """Number of ranks -> of each: case -> deviation of all numbers told ("lines") and of every weight afterwards."""
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
