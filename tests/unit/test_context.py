"""The context of a run: one process is all ranks, and a changed layout leaves the rest as it is."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.optimus.config.schema import ParallelConfig, Precision, RunConfig, TrainingConfig
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh


def test_one_process_is_all_ranks() -> None:
    config = RunConfig(training=TrainingConfig(params_dtype=Precision.BF16))
    run = RunContext.of(config, Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu"))
    assert (run.ranks.rank, run.ranks.size, run.ranks.device) == (0, 1, torch.device("cpu"))
    assert run.dtype is torch.bfloat16
    fp32 = replace(run, config=RunConfig(training=TrainingConfig(params_dtype=Precision.FP32)))
    assert fp32.dtype is torch.float32


def test_another_layout_of_the_same_run() -> None:
    config = RunConfig(training=TrainingConfig(seed=7))
    run = RunContext.of(config, Mesh(config.parallel, rank=0, world_size=1), torch.device("cpu"))
    other = run.with_parallel(ParallelConfig(tensor_model_parallel_size=2))
    assert other.config.parallel.tensor_model_parallel_size == 2 and other.config.training is config.training
    assert config.parallel.tensor_model_parallel_size == 1, "the run itself is unchanged"
    assert (other.mesh, other.ranks, other.startup) == (run.mesh, run.ranks, run.startup)
