"""Weights that a checkpoint will replace are not drawn, and nothing of what memory held before is left."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers import run_distributed
from tests.integration.conftest import TINY, write_corpus

OPTIONS = "--train-iters 4 --save-interval 4 --eval-interval 0 --expert-model-parallel-size 2"
CASES = {
    "bf16": "--params-dtype bf16 --optimizer muon --optimizer-state-dtype int8 --ema-decay 0.9 "
    "--moe-router-enable-expert-bias",
    "fp32": "--params-dtype fp32 --optimizer schedule-free-adamw --lr-decay-style constant --lr-warmup-iters 0",
}


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of parameters, buffers, masters, moments and averages of this rank."""
    found = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
    found |= {f"buffer {name}": tensor.clone() for name, tensor in trainer.model.named_buffers()}
    for number, flat_buffer in enumerate(trainer.engine.optimizer.flat_buffers):
        tensors = [*flat_buffer.state_tensors(), *(bucket.shard.master for bucket in flat_buffer.buckets)]
        found |= {f"state {number} {n}": tensor.clone() for n, tensor in enumerate(tensors)}
    return found


def _trainer(rank: int, world: int, folder: str, words: str) -> Any:
    from megatron.optimus.config.load import load
    from megatron.optimus.context import RunContext
    from megatron.optimus.platform.mesh import Mesh
    from megatron.optimus.training.trainer import Trainer

    options = [*TINY, *OPTIONS.split(), *words.split()]
    config = load([*options, "--run-dir", f"{folder}/run", "--data-path", f"{folder}/../counting"]).config
    return Trainer(RunContext.of(config, Mesh(config.parallel, rank=rank, world_size=world), torch.device("cpu")))


def _end(trainer: Any) -> None:
    trainer.close()
    trainer.engine.destroy()


def _compare(rank: int, world: int, folder: str, words: str) -> dict[str, Any]:
    from megatron.optimus.models.initialize import draw_weights
    from megatron.optimus.training import trainer as training

    # Memory that torch.empty gives is NaN (torch.utils.deterministic.fill_uninitialized_memory).
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, Any] = {}
    drawn = _trainer(rank, world, folder, words)
    found["initial"], random = _state(drawn), torch.get_rng_state()
    _end(drawn)
    with patch.object(training, "has_own_checkpoint", lambda run: True):  # a guess that turns out to be wrong
        trainer = _trainer(rank, world, folder, words)
    assert torch.equal(torch.get_rng_state(), random)
    found["drawn later"] = _state(trainer)
    trainer.fit()
    trainer.engine.optimizer.wait_for_params()
    found["trained"] = _state(trainer)
    _end(trainer)
    with (
        patch("megatron.optimus.models.initialize.draw_weights", wraps=draw_weights) as first,
        patch("megatron.optimus.training.engine.draw_weights", wraps=draw_weights) as later,
    ):
        trainer = _trainer(rank, world, folder, words)
        found["draws"], found["step"] = first.call_count + later.call_count, trainer.step
    found["resumed"] = _state(trainer)
    _end(trainer)
    return found


def _run(rank: int, world: int, folder: str) -> dict[str, dict[str, Any]]:
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(timedelta(seconds=60))
    found = {case: _compare(rank, world, f"{folder}/{n}", words) for n, (case, words) in enumerate(CASES.items())}
    shutdown_engine()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("undrawn")
    write_corpus(folder / "counting")
    for number in range(len(CASES)):
        Path(folder, str(number)).mkdir()
    return run_distributed(_run, 2, str(folder))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "expected"), [("resumed", "trained"), ("drawn later", "initial")])
def test_the_state_is_the_same(found: list[dict[str, dict[str, Any]]], case: str, name: str, expected: str) -> None:
    for rank in found:
        ours, theirs = rank[case][name], rank[case][expected]
        assert ours.keys() == theirs.keys() and len(ours) > 10
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []  # nor is NaN equal to NaN
        assert rank[case]["step"] == 4 and rank[case]["draws"] == 0
    assert any(not torch.equal(one, found[0][case]["initial"][key]) for key, one in found[0][case]["trained"].items())
