"""A rank that is slow outside of the device's products is named, and where it spends its time."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.stragglers import OwnWork, StepSampler, stragglers
from tests.helpers import run_distributed


def _sleepy(seconds: float) -> None:
    time.sleep(seconds)


def _train(rank: int, world_size: int) -> list[tuple[int, str]]:
    sampler = StepSampler()
    for _ in range(5):
        _sleepy(0.1 if rank == 1 else 0.01)
        dist.all_reduce(torch.ones(10))
    return [(one.rank, one.where) for one in sampler.report(Ranks(None, "cpu"), 5)]


def test_a_rank_that_sleeps_in_every_step_is_named_on_all_ranks() -> None:
    for found in run_distributed(_train, 3):
        assert [rank for rank, _ in found] == [1]
        assert found[0][1].startswith("_sleepy (test_stragglers.py:")


def test_what_counts_as_slow() -> None:
    def work(*seconds: float) -> list[OwnWork]:
        return [OwnWork(rank, "host", own, 1.0, "") for rank, own in enumerate(seconds)]

    assert [one.rank for one in stragglers(work(0.5, 0.55, 0.9, 0.7))[0]] == [2, 3]
    assert stragglers(work(0.5, 0.55))[0] == []
    assert stragglers(work(-1.0, -1.0, 0.3))[0] == []  # too few samples to say anything
