"""Sophia's estimates: when one is due, on how many micro-batches, and which random number stands for a label."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.context import RunContext
from megatron.optimus.data.loader import Batch
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.layers.loss import DRAWS
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.training import curvature
from megatron.optimus.training.curvature import is_due, num_micro_batches


def config(words: str = "") -> RunConfig:
    return load(f"--seq-length 8 --micro-batch-size 2 --optimizer sophia --sophia-interval 3 {words}".split()).config


def test_estimates_come_at_the_interval() -> None:
    assert [step for step in range(10) if is_due(config(), step)] == [0, 3, 6, 9]
    assert not is_due(load([]).config, 0)


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        ("", 1, 1),
        ("--sophia-batch-size 12", 1, 6),
        ("--sophia-batch-size 12", 2, 3),
        ("--sophia-batch-size 64", 1, 8),  # a ramp of batch sizes begins with fewer
        ("--pipeline-model-parallel-size 2", 2, 8),
    ],
)
def test_micro_batches_of_an_estimate(words: str, world: int, expected: int) -> None:
    run = config(words)
    mesh: Any = SimpleNamespace(size=lambda axis: run.parallel.pipeline_model_parallel_size if axis == "pp" else world)
    assert num_micro_batches(run, mesh, available=8) == expected


def draws(step: int = 0, number: int = 0, seed: int = 1, rows: int = 2) -> torch.Tensor:
    run = config(f"--seed {seed}")
    labels = torch.arange(rows * 8).view(rows, 8)
    labels[0, 3] = NO_LABEL
    batch = Batch(*(None for _ in Batch._fields))._replace(tokens_BS=labels, labels_BS=labels)  # type: ignore[arg-type]
    context = RunContext.of(run, Mesh(run.parallel, rank=0, world_size=1), torch.device("cpu"))
    return curvature._drawing(batch, number, step, context).labels_BS


def test_a_random_number_stands_for_each_label_that_counts() -> None:
    found = draws()
    assert found[0, 3] == NO_LABEL
    others = found[found != NO_LABEL]
    assert len(others) == 15 == len(others.unique()) and others.min() >= 0 and others.max() < DRAWS
    assert torch.equal(found, draws())
    for other in (draws(step=1), draws(number=1), draws(seed=2)):
        assert not torch.isin(other[other != NO_LABEL], others).any()
    # By its place in the global batch: the second micro-batch of two rows is the third and fourth row of four.
    second = draws(number=1)
    counts = second != NO_LABEL
    assert torch.equal(draws(rows=4)[2:][counts], second[counts])


def test_numbers_are_evenly_distributed() -> None:
    numbers = curvature._hash(torch.arange(200_000), seed=3, step=9).double() / DRAWS
    assert abs(numbers.mean() - 0.5) < 0.005
    assert torch.histc(numbers, 20, 0, 1).div(10_000).sub(1).abs().max() < 0.06
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.01
