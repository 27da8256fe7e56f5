"""Slow devices are found and named."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron.optimus.config.load import load
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training import stragglers
from megatron.optimus.training.stragglers import Timing, check_devices, describe, slow_ones, time_products


def timings(*milliseconds: float) -> list[Timing]:
    return [Timing(rank, f"node{rank // 2}", value / 1e3) for rank, value in enumerate(milliseconds)]


def test_the_slow_are_those_beyond_the_median_slowest_first() -> None:
    slow = slow_ones(timings(1.0, 1.09, 1.2, 1.0, 3.0, 1.05))
    assert [t.rank for t in slow] == [4, 2]
    assert describe(slow, 1e-3) == "rank 4 on node2 (3.00x), rank 2 on node1 (1.20x)"
    assert slow_ones(timings(1.0, 1.0)) == [] and describe([], 1e-3) == "none"
    assert [t.rank for t in slow_ones(timings(1.0, 2.0))] == [1], "of two, the slower one"
    assert describe(slow_ones(timings(*[1.0] * 20, *[2.0] * 11)), 1e-3).endswith("(2.00x), and 3 more")


def test_every_rank_is_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("optimus").propagate = True
    caplog.set_level(logging.INFO, "optimus")
    monkeypatch.setattr(stragglers, "time_products", lambda device, dtype: 0.002)
    ranks = Ranks.alone()
    monkeypatch.setattr(ranks, "all_gather_bytes", lambda own: [own, own, b'["other", 0.005]'])
    config = load(["--preset", "mula-tiny"]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    [slow] = check_devices(RunContext(config, mesh, torch.device("cpu"), ranks))
    assert (slow.rank, slow.host, slow.seconds) == (2, "other", 0.005)
    assert "3 ranks took 2.00 ms" in caplog.text and "rank 2 on other (2.50x)" in caplog.text


def test_the_products_take_time() -> None:
    assert 0 < time_products(torch.device("cpu"), torch.bfloat16) < 10
