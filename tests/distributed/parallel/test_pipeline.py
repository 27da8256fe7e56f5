"""A pipeline equals one process: loss, router statistics and every gradient, for each schedule."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ParallelConfig, PipelineSchedule, Recompute
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers.documents import Documents
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel import pipeline as pipeline_module
from megatron.optimus.parallel.apply import parallelize
from megatron.optimus.parallel.pipeline import Pipeline
from megatron.optimus.parallel.pipeline_stages import SPLIT_BACKWARDS, make_p2p_groups, stage_plan
from megatron.optimus.parallel.tensor import register_gradient_sums
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.pipeline_schedule import routers_of
from tests.distributed.layouts import deviation, part_of, refusal
from tests.helpers import run_distributed

BATCH, LENGTH = 2, 8
ONE, INTERLEAVED = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_1F1B
ZERO_BUBBLE, ZBV = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV


def model_config(num_layers: int, **changes: Any) -> ModelConfig:
    moe = dict(num_experts=4, moe_ffn_hidden_size=10, moe_router_topk=2, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)
    moe["moe_router_load_balancing_type"] = LoadBalancing.GLOBAL_AUX_LOSS
    sizes = dict(hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=24, max_position_embeddings=8)
    return ModelConfig(
        num_layers=num_layers, init_method_std=0.2, output_z_loss_coeff=0.02, **{**sizes, **moe, **changes}
    )


def build(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def materialise(model: Decoder) -> Decoder:
    initialize_weights(model, seed=5, device=torch.device("cpu"), dtype=torch.float32)
    return model


def batches_of(count: int, case: Case) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 32, (count, BATCH, LENGTH + 1), generator=generator)
    batches = [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
    if not case.documents:
        return batches
    # other documents in every micro-batch, and positions that count in each
    starts = [[[1 + number % 6], [3, 5 + number % 3]] for number in range(count)]
    places = [
        torch.tensor([[s - max(0, *(x for x in [*own, 0] if x <= s)) for s in range(LENGTH)] for own in rows])
        for rows in starts
    ]
    return [
        Batch(batch.tokens_BS, batch.labels_BS, Documents.from_starts(own, LENGTH), place)
        for batch, own, place in zip(batches, starts, places, strict=True)
    ]


class Case(NamedTuple):
    ranks: int
    layers: int
    schedule: PipelineSchedule
    count: int  # micro-batches
    parallel: dict[str, Any]
    model: dict[str, Any] | None = None
    documents: bool = False
    sizes: list[int] | None = None  # layers of every stage, where they are not to be taken for granted


def serial(case: Case) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    config = model_config(case.layers, **(case.model or {}))
    model = materialise(build(config))
    total, counts = 0.0, torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
    for tokens_BS, labels_BS, documents, places, *_ in batches_of(case.count, case):
        output = model(tokens_BS, labels_BS, documents, places)
        loss = output.loss_sum / labels_BS.numel()
        total += loss.item() / case.count
        loss = loss + config.moe_aux_loss_coeff * output.aux_loss + config.moe_z_loss_coeff * output.z_loss
        (loss / case.count).backward()
    for number, layer in zip(config.moe_layers, model.moe_layers(), strict=True):
        counts[number] = layer.router.step_counts_E
    return total, {name: p.grad for name, p in model.named_parameters()}, counts


def one_stage(rank: int, world: int, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: run_case(rank, world, case) for name, case in cases.items() if rank < case.ranks}


class Message(NamedTuple):
    is_send: bool
    ranks: tuple[int, int]  # both ends, ascending
    group: str


@contextlib.contextmanager
def messages_recorded() -> Iterator[list[Message]]:
    """What this rank sends and receives, in the order in which it is queued."""
    found: list[Message] = []

    def noting(function: Callable[..., Any], is_send: bool) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *, group: dist.ProcessGroup, **peer: int) -> Any:
            ends = dist.get_rank(), dist.get_global_rank(group, next(iter(peer.values())))
            found.append(Message(is_send, (min(ends), max(ends)), group.group_name))
            return function(tensor, group=group, **peer)

        return call

    noted = {"isend": noting(dist.isend, True), "recv": noting(dist.recv, False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_module, "dist", SimpleNamespace(**vars(dist) | noted))
        yield found


def waiting_for_ever(ranks: dict[int, list[Message]]) -> dict[int, Message]:
    """What every rank would wait for without end where two ranks have one queue in each group for both directions, a
    message takes both of its ends, and nothing starts before what its rank has received earlier: as with NCCL."""
    while True:
        firsts = [
            (rank, place, message)
            for rank, queued in ranks.items()
            for place, message in enumerate(queued)
            if all(earlier.is_send and earlier[1:] != message[1:] for earlier in queued[:place])
        ]
        meeting = [
            (a, b)
            for a, b in itertools.combinations(firsts, 2)
            if a[2][1:] == b[2][1:] and {a[0], b[0]} == set(a[2].ranks) and a[2].is_send != b[2].is_send
        ]
        if not meeting:
            return {rank: queued[0] for rank, queued in ranks.items() if queued}
        for rank, place, _ in meeting[0]:
            del ranks[rank][place]


def run_case(rank: int, world: int, case: Case) -> dict[str, Any]:
    config = model_config(case.layers, **(case.model or {}))
    parallel = ParallelConfig(pipeline_schedule=case.schedule, **case.parallel)
    mesh = Mesh(parallel, rank=rank, world_size=world)
    plan = stage_plan(config, parallel, LENGTH, mesh.index("pp"))
    model = build(config)
    parallelize(model, mesh, parallel, LENGTH)
    materialise(model)
    register_gradient_sums(model, mesh)
    group = mesh.group("pp")
    assert group is not None
    tp = mesh.size("tp")
    pipeline = Pipeline(
        model,
        plan,
        case.schedule,
        group,
        num_micro_batches=case.count,
        tokens_shape=(BATCH, LENGTH),
        hidden_shape=(BATCH, LENGTH, config.hidden_size) if tp == 1 else (1, BATCH * LENGTH // tp, config.hidden_size),
        positions=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        p2p_groups=make_p2p_groups(mesh, parallel, torch.device("cpu")),
    )
    batches = batches_of(case.count, case)
    with messages_recorded() as messages:
        before = [loss.item() for loss in pipeline.evaluate(batches)]
    loss_sums = pipeline.forward_backward(batches, BATCH * LENGTH)
    loss, grads, counts = serial(case)
    deviations = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        grad, whole = parameter.grad, part_of(grads[name], parameter)
        if getattr(parameter, "pipe_tied", False):
            grad = grad.clone()
            dist.all_reduce(grad, group=mesh.first_and_last_group("pp"))
        if hasattr(parameter, "expert_ids") and mesh.group("edp") is not None:
            grad = grad.clone()
            dist.all_reduce(grad, group=mesh.group("edp"))
        deviations[name] = deviation(grad, whole)
    for index, router in routers_of(model).items():
        seen_E = router.step_counts_E
        if mesh.group("tp") is not None:
            dist.all_reduce(seen_E, group=mesh.group("tp"))
        assert torch.equal(seen_E, counts[index]), f"layer {index}"
    if pipeline.is_last:
        values = [sum(x.item() for x in loss_sums), sum(before)]
        for value in values:
            assert value / (BATCH * LENGTH * case.count) == pytest.approx(loss, rel=1e-6)
    layers = [list(plan.layers[stage]) for stage in plan.local_stages]
    assert case.sizes is None or case.sizes == [len(part) for part in plan.layers]
    return {"layers": layers, "deviations": deviations, "messages": messages}


def refused(case: Case) -> str | None:
    return refusal(case.schedule, case.count, case.parallel["pipeline_model_parallel_size"])


def stages(pp: int, chunks: int = 1, **more: Any) -> dict[str, Any]:
    return dict(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=chunks, **more)


EVERYTHING = dict(recompute_modules=list(Recompute))
TP2 = dict(tensor_model_parallel_size=2)
TIED = dict(untie_embeddings_and_output_weights=False)
# A layer with experts is worth two dense ones.
MIXED = dict(moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=24, moe_layer_freq=[0, 0, 0, 0, 1, 1])
# Of the auxiliary loss the gradient is that of each micro-batch: with split tokens no statistics are carried over.
PLAIN = dict(moe_router_load_balancing_type=LoadBalancing.AUX_LOSS)
CASES = {
    2: {
        "1f1b": Case(2, 4, ONE, 4, stages(2)),
        "fewer micro-batches than stages, uneven": Case(2, 3, ONE, 1, stages(2)),
        "interleaved": Case(2, 4, INTERLEAVED, 4, stages(2, 2)),
        "dense": Case(2, 4, INTERLEAVED, 2, stages(2, 2), dict(num_experts=0, moe_router_topk=1)),
        "1f1b, documents": Case(2, 2, ONE, 3, stages(2), documents=True),
        "interleaved, documents": Case(2, 4, INTERLEAVED, 4, stages(2, 2), documents=True),
        "1f1b, tied": Case(2, 2, ONE, 3, stages(2), TIED),
        "interleaved, tied, recomputed": Case(2, 4, INTERLEAVED, 4, stages(2, 2, **EVERYTHING), TIED),
        "zero bubble": Case(2, 4, ZERO_BUBBLE, 4, stages(2, 2)),
        "zbv": Case(2, 4, ZBV, 4, stages(2, 2)),
        "zero bubble, documents": Case(2, 4, ZERO_BUBBLE, 4, stages(2, 2), documents=True),
        "zbv, tied": Case(2, 4, ZBV, 4, stages(2, 2), TIED),
        "1f1b, dense layers and experts": Case(2, 6, ONE, 3, stages(2), MIXED, sizes=[4, 2]),
        "interleaved, dense layers and experts": Case(2, 6, INTERLEAVED, 4, stages(2, 2), MIXED, sizes=[2, 2, 1, 1]),
        "zbv, dense layers and experts": Case(2, 6, ZBV, 4, stages(2, 2), MIXED, sizes=[2, 2, 1, 1]),
        "zero bubble, everything recomputed": Case(2, 4, ZERO_BUBBLE, 4, stages(2, 2, **EVERYTHING)),
        "zbv, everything recomputed": Case(2, 4, ZBV, 4, stages(2, 2, **EVERYTHING)),
    },
    4: {
        "four stages, fixed ends": Case(
            4,
            6,
            ONE,
            6,
            stages(4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=1),
        ),
        "1f1b, tp 2": Case(4, 2, ONE, 3, stages(2, **TP2), PLAIN),
        "zero bubble, tp 2": Case(4, 4, ZERO_BUBBLE, 4, stages(2, 2, **TP2), PLAIN),
        "zero bubble, tp 2, overlapped, everything recomputed": Case(
            4, 4, ZERO_BUBBLE, 4, stages(2, 2, **TP2, tp_comm_overlap=True, **EVERYTHING), PLAIN
        ),
        "zbv, tp 2, everything recomputed": Case(4, 4, ZBV, 4, stages(2, 2, **TP2, **EVERYTHING), PLAIN),
    },
}


@pytest.fixture(scope="module")
def results() -> Callable[[int], list[dict[str, dict[str, Any]]]]:
    """All cases of so many ranks that this torch can run, in one start of them."""

    @functools.cache
    def run(ranks: int) -> list[dict[str, dict[str, Any]]]:
        return run_distributed(
            one_stage, ranks, {name: case for name, case in CASES[ranks].items() if refused(case) is None}
        )

    return run


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_pipeline_equals_one_process(
    results: Callable[[int], list[dict[str, dict[str, Any]]]], ranks: int, name: str
) -> None:
    """Loss, router statistics (both checked on the ranks) and every gradient, for each schedule."""
    case = CASES[ranks][name]
    if reason := refused(case):
        pytest.skip(reason)
    found = [result[name] for result in results(ranks)]
    layers = [index for result in found for part in result["layers"] for index in part]
    copies = case.parallel.get("tensor_model_parallel_size", 1)
    assert sorted(layers) == sorted(list(range(case.layers)) * copies)
    names = {parameter for result in found for parameter in result["deviations"]}
    whole = build(model_config(case.layers, **(case.model or {})))
    assert names == {parameter for parameter, _ in whole.named_parameters()}
    assert waiting_for_ever({rank: list(result["messages"]) for rank, result in enumerate(found)}) == {}
    wrong = {p: value for result in found for p, value in result["deviations"].items() if not value <= 1e-5}
    assert wrong == {}


@pytest.mark.parametrize(
    ("version", "stages", "refused"), [("2.8.0", 2, True), ("2.8.0", 1, False), ("2.10.0", 2, False)]
)
def test_stages_are_refused_where_torch_has_one_group_for_them(
    monkeypatch: pytest.MonkeyPatch, version: str, stages: int, refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    reason = refusal(PipelineSchedule.ONE_F_ONE_B, num_stages=stages)
    assert (reason is not None) is refused
    assert reason is None or reason.startswith("pipeline_model_parallel_size=2 needs torch 2.10, this is 2.8.0")


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.13.0", False), ("2.14.0.dev1", False)])
def test_zero_bubble_is_refused_where_torch_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for schedule in PipelineSchedule:
        reason = refusal(schedule)
        assert (reason is not None) is (refused and schedule in SPLIT_BACKWARDS)
        assert reason is None or f"pipeline_schedule={schedule.value} needs torch 2.13, this is {version}" in reason


@pytest.mark.parametrize(("version", "told"), [("2.10.0", True), ("2.11.0+cu130", False), ("2.13.0", False)])
def test_fewer_micro_batches_than_stages_are_refused_where_torch_cannot_run_them(
    monkeypatch: pytest.MonkeyPatch, version: str, told: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    reason = refusal(ONE, 2, 4)
    assert (reason is not None) is told
    assert reason is None or "2 micro-batches for 4 pipeline stages: fewer than stages need torch 2.11" in reason
    assert refusal(ONE, 4, 4) is None
