"""A run that replays its micro-batches has the losses, metrics and weights of one that does not.

On the CPU a stand-in takes the graph's place: it does the arithmetic of a micro-batch again and undoes all that the
host has noted meanwhile, as a replay would not note it. On a GPU, graphs are recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.ops import fp8
from megatron.optimus.platform.device import DeviceGraph
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training.cuda_graphs import MicroBatchGraphs, graphs_of
from megatron.optimus.training.metrics import read_metrics
from tests.helpers import run_distributed, run_on_gpus
from tests.integration.conftest import TINY, write_corpus

STEPS, MICRO_BATCHES, WARM_UP = 7, 3, 2
OPTIONS = f"--train-iters {STEPS} --eval-interval 4 --save-interval 100 --split 7,3 --moe-router-enable-expert-bias"
DENSE = "--num-experts 0 --ffn-hidden-size 48 --moe-router-enable-expert-bias false"
FLOAT8 = "--fp8 hybrid --moe-ffn-hidden-size 32"
KEYS = ("step", "lr", "loss", "grad_norm", "valid_loss", "aux_loss", "z_loss", "dropped_tokens", "expert_load_LE")


class RepeatedWork(DeviceGraph):
    """Records and replays on the CPU: a replay alone changes device memory, a recording alone what the host noted."""

    engine: Any  # set by the test
    replays = 0

    def __init__(self, pool: Any = None) -> None:
        self._reducer = self.engine.optimizer._reducer

    def _memory(self) -> list[torch.Tensor]:
        gradients = [flat.grad_buffer for flat in self.engine.optimizer.flat_buffers]
        return [*gradients, *(buffer for name, buffer in self.engine.module.named_buffers() if "step_counts" in name)]

    def record(self, work: Callable[[], Any]) -> Any:
        memory, earlier = [tensor.clone() for tensor in self._memory()], fp8.kept_so_far()
        self._held, self._work = self._reducer.held(), work
        self._result = work()
        self._quantized = {key: made for key, made in fp8.kept_so_far().items() if key not in earlier}
        for tensor, before in zip(self._memory(), memory, strict=True):
            tensor.copy_(before)
        return self._result

    def replay(self) -> None:
        RepeatedWork.replays += 1
        reducer, optimizer = self._reducer, self.engine.optimizer
        before = reducer.held(), reducer._was_dirty, reducer._num_backwards, optimizer.has_begun
        self._hold(self._held)
        with fp8.constant_weights() if self._quantized else nullcontext():  # a recording that quantized does it again
            loss, recorded = self._work()
            for key, made in fp8.kept_so_far().items() if self._quantized else ():
                for name, tensor in vars(made).items():
                    getattr(self._quantized[key], name).copy_(tensor)
        self._hold(before[0])
        reducer._was_dirty, reducer._num_backwards, optimizer.has_begun = before[1:]
        self._result[0].copy_(loss)
        for old, new in zip(self._result[1], recorded, strict=True):
            old[1].copy_(new[1])

    def _hold(self, held: Any) -> None:
        for state, params in zip(self._reducer._queue, held, strict=True):
            state.filled.clear()
            state.filled.update(params)


def _fit(rank: int, world: int, words: list[str], device: str, imitate: bool) -> list[torch.Tensor]:
    """Trains up to the exit interval or the end; the weights then."""
    from megatron.optimus.training.trainer import Trainer

    config = load(words).config
    mesh = Mesh(config.parallel, rank=rank, world_size=world)
    trainer = Trainer(RunContext.of(config, mesh, torch.device(device)))
    if imitate:
        RepeatedWork.engine = trainer.engine
        trainer.schedule.graphs = MicroBatchGraphs(trainer.engine, trainer.run.ranks, RepeatedWork)  # type: ignore
    assert trainer.fit() == 0
    trainer.engine.optimizer.wait_for_params()
    weights = [weight.detach().cpu().clone() for weight in trainer.model.parameters()]
    trainer.close()
    trainer.engine.destroy()
    return weights


def _compare(rank: int, world: int, folder: str, cases: dict[str, str], device: str = "cpu") -> None:
    from megatron.optimus.training.engine import init_engine, shutdown_engine

    init_engine(timedelta(seconds=60))
    for name, options in cases.items():
        batch = f"--global-batch-size {2 * MICRO_BATCHES * world}"
        words = [*TINY, *OPTIONS.split(), *batch.split(), *options.split(), "--data-path", f"{folder}/counting"]
        words += ["--device", device]
        found: dict[str, list[torch.Tensor]] = {}
        for kind in ("engine", "graphs"):
            own = [*words, "--run-dir", f"{folder}/{name}-{kind}"]
            own += ["--cuda-graphs"] if device == "cuda" and kind == "graphs" else []
            replays = RepeatedWork.replays
            if kind == "graphs":  # saved after a replay, and resumed
                _fit(rank, world, [*own, "--exit-interval", "4"], device, device == "cpu")
            found[kind] = _fit(rank, world, own, device, kind == "graphs" and device == "cpu")
            if device == "cpu":
                replayed = STEPS - 2 * WARM_UP  # either process begins with its warm-up
                expected = replayed * (MICRO_BATCHES - (world > 1)) if kind == "graphs" else 0
                assert RepeatedWork.replays - replays == expected
        for one, other in zip(found["engine"], found["graphs"], strict=True):
            assert torch.equal(one, other), name
        runs = [read_metrics(Path(folder) / f"{name}-{kind}" / "metrics.jsonl") for kind in found]
        lines = [[{key: line.get(key) for key in KEYS} for line in run] for run in runs]
        assert [line["step"] for line in lines[0]] == list(range(1, STEPS + 1))
        assert lines[0] == lines[1], name
    shutdown_engine()


def test_replayed_micro_batches_give_the_same_bits(tmp_path: Path) -> None:
    write_corpus(tmp_path / "counting")
    run_distributed(_compare, 1, str(tmp_path), {"moe": "", "float8": f"{DENSE} {FLOAT8}"})
    one_loss_a_rank = "--moe-router-load-balancing-type aux_loss"
    cases = {"moe, two ranks": one_loss_a_rank, "float8, two ranks": f"{DENSE} {FLOAT8}"}
    run_distributed(_compare, 2, str(tmp_path), cases)


def test_a_cpu_has_no_graphs() -> None:
    run = SimpleNamespace(
        config=load([*TINY, "--data-path", "none", "--cuda-graphs"]).config, device=torch.device("cpu")
    )
    with pytest.raises(
        ConfigError, match=r"^cuda_graphs=True needs device=cuda, this run has device=cpu; leave it out$"
    ):
        graphs_of(run, None)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_give_the_same_bits_on_a_gpu(tmp_path: Path) -> None:
    write_corpus(tmp_path / "counting")
    in_bf16 = "--params-dtype bf16 --deterministic"
    cases = {"dense": f"{DENSE} {in_bf16}", "moe": in_bf16}
    cases |= {f"{name}, float8": f"{options} {FLOAT8}" for name, options in cases.items()}
    run_on_gpus(_compare, 1, str(tmp_path), cases, "cuda")
    with pytest.raises(AssertionError, match=r"TrainingError: cuda_graphs=True: a micro-batch cannot be recorded \("):
        run_on_gpus(_compare, 1, str(tmp_path), {"experts in fp32 wait for the host": ""}, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_graphs_give_the_same_bits_on_two_gpus(tmp_path: Path) -> None:
    write_corpus(tmp_path / "counting")
    one_loss_a_rank = "--moe-router-load-balancing-type aux_loss --expert-model-parallel-size 1"
    in_bf16 = "--params-dtype bf16 --deterministic"
    cases = {"dense": f"{DENSE} {in_bf16}", "moe": f"{in_bf16} {one_loss_a_rank}"}
    cases |= {f"{name}, float8": f"{options} {FLOAT8}" for name, options in cases.items()}
    run_on_gpus(_compare, 2, str(tmp_path), cases, "cuda")
