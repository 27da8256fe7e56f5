"""A batch size that grows and several validation sets, through the whole program: any layout, resumed, evaluated."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.optimus.checkpoint import store
from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

# Batches of 4 (four of them), 8 (two), 12 (two), then 16: as many micro-batches that no count divides the steps before.
RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 48 --train-samples 91 --lr-warmup-samples 20"
RAMP += " --save-interval 100 --split 9,1"
SIZES = [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]
STAGES = "--pipeline-model-parallel-size 2"
DENSE = "--num-experts 0 --ffn-hidden-size 48 --num-layers 1"
CASES = {  # two ranks
    "experts": "--expert-model-parallel-size 2",
    "experts, stage 2": "--expert-model-parallel-size 2 --zero-stage 2",
    "dense, stage 3": f"{DENSE} --zero-stage 3",
    "stages": STAGES,
    "interleaved": f"{STAGES} --virtual-pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b "
    "--num-layers 4",
    "fewer micro-batches than stages": f"{STAGES} --micro-batch-size 4",
}
ALONE = {"one": "", "four layers": "--num-layers 4", "large micro-batches": "--micro-batch-size 4", "dense": DENSE}
TWIN = {"interleaved": "four layers", "fewer micro-batches than stages": "large micro-batches"}
TWIN["dense, stage 3"] = "dense"
KEYS = ("step", "consumed_tokens", "global_batch_size", "lr", "loss", "aux_loss", "grad_norm", "valid_loss")
KEYS += ("valid_loss/all", "valid_loss/ends")
LAST = "checkpoints/step-00000010"


def _config(folder: str, run: str, options: str) -> Any:
    words = [*TINY, *RAMP.split(), "--run-dir", f"{folder}/{run}", "--data-path", f"{folder}/counting"]
    words += ["--valid-data-path", f"all={folder}/counting", f"ends={folder}/ends"]
    return load([*words, *options.split()]).config


def _train(rank: int, world: int, folder: str, run: str, options: str) -> None:
    from megatron.optimus.training.trainer import Trainer

    config = _config(folder, run, options)
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    trainer = Trainer(RunContext.of(config, mesh, torch.device("cpu")))
    staged = config.parallel.pipeline_model_parallel_size > 1
    if staged:  # what torch refuses for few micro-batches, it refuses at once
        assert trainer.schedule.pipeline.num_micro_batches == 4 // config.training.micro_batch_size
        reduce, reductions = trainer.engine.optimizer.reduce_gradients, Counter[int]()
        trainer.engine.optimizer.reduce_gradients = lambda: (reductions.update([trainer.step]), reduce())
    assert trainer.fit() == 0
    if staged:
        chunks = config.parallel.virtual_pipeline_model_parallel_size
        assert reductions == dict.fromkeys(range(10), chunks), "each chunk's gradients once a step"
    trainer.close()
    trainer.engine.destroy()


def _runs(rank: int, world: int, folder: str) -> None:
    from megatron.optimus.training.engine import init_engine, shutdown_engine
    from megatron.optimus.training.evaluate import evaluate

    init_engine(timedelta(seconds=60))
    for run, options in (CASES if world > 1 else ALONE).items():
        _train(rank, world, folder, run, options)
    if world > 1:
        for stop in ("--exit-interval 5", "--exit-interval 7", ""):  # within the stage of 8, and within that of 12
            _train(rank, world, folder, "resumed", f"{CASES['experts']} {stop}")
        held_out = f"--data-path {folder}/ends --split 0,1"  # so the share of the split is the whole file too
        options = f"{STAGES} --skip-train --load {folder}/one/checkpoints {held_out}"
        config = _config(folder, "evaluated", options)
        mesh = Mesh(config.parallel, rank=rank, world_size=world)
        evaluate(RunContext.of(config, mesh, torch.device("cpu")))
    shutdown_engine()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ramp")
    write_corpus(folder / "counting")
    write_corpus(folder / "ends", seed=7)
    for world in (1, 2):
        run_distributed(_runs, world, str(folder))
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [
        {key: line[key] for key in KEYS if line.get(key) is not None} for line in read_metrics(run / "metrics.jsonl")
    ]


def tensors(run: Path) -> dict[tuple[str, str], torch.Tensor]:
    requests = store.everything(store.load_manifest(run / LAST))
    store.load(run / LAST, requests)
    return {(request.name, request.kind): request.tensor for request in requests}


def test_steps_grow_over_the_samples(runs: Path) -> None:
    found = lines(runs / "one")
    assert [line["global_batch_size"] for line in found] == SIZES
    assert [line["consumed_tokens"] for line in found] == [32 * sum(SIZES[: n + 1]) for n in range(10)]
    warmup = [3e-4 + 2.7e-3 * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    decay = [
        3e-4 + 1.35e-3 * (1 + math.cos(math.pi * (position - 20) / (91 - 20))) for position in (24, 32, 44, 56, 72)
    ]
    assert [line["lr"] for line in found] == pytest.approx(warmup + decay)
    assert found[-1]["loss"] < found[0]["loss"] - 0.1


@pytest.mark.parametrize("case", CASES)
def test_any_layout_takes_the_same_steps(runs: Path, case: str) -> None:
    expected, found = (lines(runs / run) for run in (TWIN.get(case, "one"), case))
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, reference in zip(found, expected, strict=True):
        assert line == pytest.approx(reference, rel=2e-5), line["step"]
    reference_tensors, own = tensors(runs / TWIN.get(case, "one")), tensors(runs / case)
    for (name, kind), tensor in reference_tensors.items():
        if kind == "master":
            assert torch.allclose(own[name, kind], tensor, rtol=0, atol=1e-5 * float(tensor.abs().max())), name


def test_a_run_resumed_within_the_ramp_equals_the_unbroken_one_bit_for_bit(runs: Path) -> None:
    assert lines(runs / "resumed") == lines(runs / "experts")
    manifests = [store.load_manifest(runs / run / LAST) for run in ("resumed", "experts")]
    assert manifests[0].consumed_samples == manifests[1].consumed_samples == 88
    resumed, unbroken = (tensors(runs / run) for run in ("resumed", "experts"))
    assert resumed.keys() == unbroken.keys() and len(unbroken) > 40
    for key, tensor in unbroken.items():
        assert torch.equal(resumed[key], tensor), key


def test_every_validation_set_has_its_loss_and_an_evaluation_gives_the_same(runs: Path) -> None:
    found = lines(runs / "one")
    assert [line["step"] for line in found if "valid_loss" in line] == [4, 8, 10]
    last = found[-1]
    assert len({last["valid_loss"], last["valid_loss/all"], last["valid_loss/ends"]}) == 3
    evaluated = json.loads((runs / "evaluated" / "evaluation.json").read_text())
    assert evaluated["step"] == 10 and set(evaluated) == {"step", "validation", "all", "ends"}
    assert evaluated["validation"] == evaluated["ends"]
    for name, key in (("all", "valid_loss/all"), ("ends", "valid_loss/ends")):
        assert evaluated[name]["loss"] == pytest.approx(last[key], rel=1e-5)
        assert evaluated[name]["tokens"] == 16 * 32
