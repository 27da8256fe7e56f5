"""A metric recorded in a layer is a field of metrics.jsonl, with the value of the whole batch at every layout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.layers.norm import RMSNorm
from megatron.optimus.platform import metrics
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

STEPS, LAYERS, TOKENS = 6, 2, 8 * 32  # tokens of a global batch
LATE = 3  # the step from which on one metric is recorded
OPTIONS = f"--train-iters {STEPS} --eval-interval 2 --global-batch-size 8 --micro-batch-size 2"
ALONE = {"alone": "", "alone, recomputed": "--recompute-modules moe norm attention"}
TWO_RANKS = {
    "data parallel": "--expert-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2 --recompute-modules norm",
}


def record_in(layer: nn.Module, number: int, trainer: Any) -> None:
    """Makes a layer record metrics of its output."""
    forward = layer.forward

    def recording(*args: Any) -> Any:
        x_BSD, losses = forward(*args)
        metrics.record("toy/mean", x_BSD.square().mean())
        metrics.record(f"toy/layer_{number}_max", x_BSD.abs().max(), reduce="max")
        metrics.record("toy/tokens", x_BSD.shape[0] * x_BSD.shape[1], reduce="sum")
        if number == LAYERS - 1 and trainer.step + 1 >= LATE:
            metrics.record("toy/late", 1.0, reduce="sum")
        return x_BSD, losses

    layer.forward = recording  # type: ignore[method-assign]


def _runs(rank: int, world: int, folder: str, cases: dict[str, str]) -> None:
    from megatron.optimus.training.engine import init_engine, shutdown_engine
    from megatron.optimus.training.trainer import Trainer

    init_engine(timedelta(seconds=60))
    norm = RMSNorm.forward

    def counted_norm(self: RMSNorm, *inputs: Any) -> Tensor:
        metrics.record("toy/norms", 1.0, reduce="sum")
        return norm(self, *inputs)

    for name, words in cases.items():
        argv = [*TINY, *OPTIONS.split(), *words.split(), "--run-dir", f"{folder}/{name}"]
        config = load([*argv, "--data-path", f"{folder}/counting"]).config
        mesh = Mesh(config.parallel, rank=rank, world_size=world)
        with mock.patch.object(RMSNorm, "forward", counted_norm):
            trainer = Trainer(RunContext.of(config, mesh, torch.device("cpu")))
            for number, layer in trainer.model.layers.named_children():
                record_in(layer, int(number), trainer)
            assert trainer.fit() == 0
        trainer.close()
        trainer.engine.destroy()
    shutdown_engine()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("recorded")
    write_corpus(folder / "counting")
    run_distributed(_runs, 1, str(folder), ALONE)
    run_distributed(_runs, 2, str(folder), TWO_RANKS)
    return {name: read_metrics(folder / name / "metrics.jsonl") for name in (*ALONE, *TWO_RANKS)}


@pytest.mark.parametrize("name", [*ALONE, *TWO_RANKS])
def test_it_has_the_value_of_the_whole_batch(lines: dict[str, list[dict[str, Any]]], name: str) -> None:
    found, expected = lines[name], lines["alone"]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, alone in zip(found, expected, strict=True):
        assert line["toy/tokens"] == LAYERS * TOKENS, "evaluation and recomputation must not count"
        assert line["toy/norms"] == alone["toy/norms"] > 0
        for key in ("toy/mean", "toy/layer_0_max", "toy/layer_1_max", "loss", "aux_loss", "router_entropy"):
            assert line[key] == pytest.approx(alone[key], rel=1e-4), key
        assert line["dropped_tokens"] == 0


@pytest.mark.parametrize("name", [*ALONE, *TWO_RANKS])
def test_a_metric_that_begins_late_is_there_from_the_step_after(
    lines: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Also where only one rank records it."""
    micro_batches = TOKENS // (2 * 32)  # of all ranks
    late = [line.get("toy/late") for line in lines[name]]
    assert late == [None] * LATE + [micro_batches] * (STEPS - LATE)
