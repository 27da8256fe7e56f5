"""A pipeline equals one process: loss, router statistics and every gradient, for each schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.optimus.config.schema import LoadBalancing, ModelConfig, ParallelConfig, PipelineSchedule
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights
from megatron.optimus.parallel.mesh import Mesh
from megatron.optimus.parallel.pipeline import Pipeline, keep_stages, stage_plan
from tests.helpers import run_distributed

BATCH, LENGTH = 2, 8
Split = dict[str, int]
ONE, INTERLEAVED = PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_1F1B
ZERO_BUBBLE, ZBV = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV


def model_config(num_layers: int, **changes: Any) -> ModelConfig:
    moe = dict(num_experts=4, moe_ffn_hidden_size=10, moe_router_topk=2, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)
    moe["moe_router_load_balancing_type"] = LoadBalancing.GLOBAL_AUX_LOSS
    sizes = dict(hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=24, max_position_embeddings=8)
    return ModelConfig(num_layers=num_layers, init_method_std=0.2, **{**sizes, **moe, **changes})


def build(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def materialise(model: Decoder) -> Decoder:
    initialize_weights(model, seed=5, device=torch.device("cpu"), dtype=torch.float32)
    return model


def batches_of(count: int, replica: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(7 + replica)
    rows = torch.randint(0, 32, (count, BATCH, LENGTH + 1), generator=generator)
    return [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def serial(config: ModelConfig, count: int) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    model = materialise(build(config))
    total, counts = 0.0, torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
    for tokens_BS, labels_BS, *_ in batches_of(count):
        output = model(tokens_BS, labels_BS)
        loss = output.loss_sum / labels_BS.numel()
        total += loss.item() / count
        loss = loss + config.moe_aux_loss_coeff * output.aux_loss + config.moe_z_loss_coeff * output.z_loss
        (loss / count).backward()
        for index, stats in enumerate(output.router_stats):
            model.moe_layers()[index].router.record_micro_batch(stats.counts_E)
            counts[index] += stats.counts_E
    return total, {name: p.grad for name, p in model.named_parameters()}, counts


def one_stage(
    rank: int,
    world: int,
    config: ModelConfig,
    schedule: PipelineSchedule,
    chunks: int,
    count: int,
    split: Split,
) -> dict[str, Any]:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=world,
        pipeline_schedule=schedule,
        virtual_pipeline_model_parallel_size=chunks,
        decoder_first_pipeline_num_layers=split.get("first"),
        decoder_last_pipeline_num_layers=split.get("last"),
    )
    mesh = Mesh(parallel, rank=rank, world_size=world)
    plan = stage_plan(config, parallel, mesh.index("pp"))
    model = build(config)
    keep_stages(model, plan)
    materialise(model)
    group = mesh.group("pp")
    assert group is not None
    pipeline = Pipeline(
        model,
        plan,
        schedule,
        group,
        num_micro_batches=count,
        tokens_shape=(BATCH, LENGTH),
        hidden_shape=(BATCH, LENGTH, config.hidden_size),
        positions=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    before = [loss.item() for loss in pipeline.evaluate(batches_of(count)).loss_sums]
    record = pipeline.forward_backward(batches_of(count), BATCH * LENGTH)
    return {
        "loss": sum(loss.item() for loss in record.loss_sums) / (BATCH * LENGTH * count),
        "evaluated": sum(before) / (BATCH * LENGTH * count),
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "counts": {index: sum(s.counts_E for s in stats) for index, stats in record.stats.items()},
        "layers": [list(plan.layers[stage]) for stage in plan.mine],
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-12)
    assert error <= 1e-5, f"{what}: {error:.1e} of the largest value"


@pytest.mark.parametrize(
    ("ranks", "layers", "schedule", "chunks", "count", "split"),
    [
        (2, 4, ONE, 1, 4, {}),
        (2, 3, ONE, 1, 1, {}),  # fewer micro-batches than stages; uneven
        (4, 6, ONE, 1, 6, {"first": 1, "last": 1}),
        (2, 4, INTERLEAVED, 2, 4, {}),
        (2, 4, ZERO_BUBBLE, 2, 4, {}),
        (2, 4, ZBV, 2, 4, {}),
    ],
)
def test_moe_pipeline_equals_one_process(
    ranks: int, layers: int, schedule: PipelineSchedule, chunks: int, count: int, split: Split
) -> None:
    check(model_config(layers), ranks, schedule, chunks, count, split)


def test_dense_pipeline_equals_one_process() -> None:
    check(model_config(4, num_experts=0, moe_router_topk=1), 2, INTERLEAVED, 2, 2, {})


def check(config: ModelConfig, ranks: int, schedule: PipelineSchedule, chunks: int, count: int, split: Split) -> None:
    loss, grads, counts = serial(config, count)
    results = run_distributed(one_stage, ranks, config, schedule, chunks, count, split)
    assert sorted(index for r in results for part in r["layers"] for index in part) == list(range(config.num_layers))
    assert sum(r["loss"] for r in results) == pytest.approx(loss, rel=1e-6)
    assert sum(r["evaluated"] for r in results) == pytest.approx(loss, rel=1e-6)
    found = {name: grad for r in results for name, grad in r["grads"].items()}
    assert found.keys() == grads.keys()
    for name, expected in grads.items():
        assert found[name] is not None, f"{name} got no gradient: {[n for n in grads if found[n] is None]}"
        assert_close(found[name], expected, name)
    for r in results:
        for index, seen_E in r["counts"].items():
            assert torch.equal(seen_E, counts[index]), f"layer {index}"
