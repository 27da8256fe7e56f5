"""Outlying steps are skipped, a broken run ends, and slow devices are found and named."""

from __future__ import annotations

import json
import logging
import math
import random

import pytest
import torch

from megatron.optimus.config.checks import check
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.platform.mesh import Mesh
from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training import health
from megatron.optimus.training.health import (
    MAX_SKIPPED_IN_A_ROW,
    WINDOW,
    DeviceTime,
    Health,
    RecentValues,
    TrainingError,
    check_devices,
    describe,
    slow_devices,
    time_products,
)


def observe(health: Health, step: int, skipped: bool = False, norm: float = math.nan, loss: float = 1.0) -> None:
    health.observe(step, loss=loss, grad_norm=norm if skipped else 1.0, skipped=skipped)


def test_only_consecutive_skips_end_the_run() -> None:
    health = Health()
    for step in range(1, 3 * MAX_SKIPPED_IN_A_ROW):
        observe(health, step, skipped=step % MAX_SKIPPED_IN_A_ROW != 0)
    health = Health()
    for step in range(100, 100 + MAX_SKIPPED_IN_A_ROW - 1):
        observe(health, step, skipped=True)
    with pytest.raises(TrainingError, match=r"not finite in 5 steps in a row, up to step 104; .* before step 100"):
        observe(health, 104, skipped=True)


def test_a_run_of_nothing_but_spikes_ends_with_their_size() -> None:
    health = Health(spike_sigma=6.0)
    with pytest.raises(TrainingError, match=r"norms were far above the usual \(70\) in 5 steps in a row"):
        for step in range(5):
            observe(health, step, skipped=True, norm=70.0 - step)


def test_the_limit_is_that_of_the_window_two_steps_before() -> None:
    recent = RecentValues()
    for step in range(1, 34):
        recent.add(step, float(step % 2))
    assert recent.limit(33, 3.0) == math.inf, "of 31 values nothing is concluded"
    assert recent.limit(34, 3.0) == pytest.approx(0.5 + 3 * 0.5)
    recent.add(34, 1e6)
    recent.add(35, math.nan)
    assert recent.limit(35, 3.0) == pytest.approx(0.5 + 3 * 0.5, rel=0.1), "the step before counts one step later"
    assert recent.limit(36, 3.0) > 1e5
    for step in range(36, 37 + WINDOW):
        recent.add(step, 2.0)
    assert recent.limit(38 + WINDOW, 3.0) == 2.0, "what lies before the window is forgotten"


def test_a_stored_window_judges_alike_and_a_foreign_one_is_ignored() -> None:
    first, second = RecentValues(), RecentValues()
    for step in range(1, 500):
        first.add(step, math.sin(step) + 0.1)
    second.restore(json.loads(json.dumps(first.to_json())))
    for step in range(500, 503):
        assert first.limit(step, 2.5) == second.limit(step, 2.5) < math.inf
        first.add(step, 0.3)
        second.add(step, 0.3)
    for stored in (None, 7, [3, [1], ["a", 2], [1, None], [1, 2, 3], [1, math.inf]]):
        second.restore(stored)
        assert second.to_json() == []


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("optimus").propagate = True
    caplog.set_level(logging.INFO, "optimus")
    return caplog


def test_a_loss_spike_is_one_line(lines: pytest.LogCaptureFixture) -> None:
    health = Health()
    for step in range(1, 60):
        observe(health, step, loss=2.0 + 0.01 * (step % 3) + (3.0 if step in (50, 51) else 0.0))
    [line] = _lines(lines)
    assert line == "step 50: loss far above the usual: 5.02 after 2.01 in the steps before"
    assert health.summary() == ["loss far above the usual in 2 steps, from step 50 to step 51"]


@pytest.mark.parametrize(("name", "factor"), [("grad_norm", 1000.0), ("z_loss", 1000.0), ("grad_norm", 30.0)])
def test_a_norm_far_out_is_one_line_without_any_option(
    lines: pytest.LogCaptureFixture, name: str, factor: float
) -> None:
    health = Health()
    for step in range(1, 60):
        value = (0.5 + 0.2 * math.sin(step)) * (factor if step == 40 else 1.0)
        values = {"loss": 3.0, "grad_norm": 0.4, "others": {}} | (
            {"grad_norm": value} if name == "grad_norm" else {"others": {name: value}}
        )
        health.observe(step, skipped=False, **values)
    [line] = _lines(lines)
    assert line.startswith(f"step 40: {name} far above the usual")


def test_what_is_not_finite_is_named_at_once_and_in_the_end(lines: pytest.LogCaptureFixture) -> None:
    health = Health()
    for step in range(1, 101):
        others = {"z_loss": math.inf if step > 30 else 0.1, "router_entropy": 1.0}
        health.observe(step, loss=1.0, grad_norm=1.0, skipped=False, others=others)
    assert _lines(lines) == ["step 31: z_loss not finite: it is inf"]
    assert health.summary() == ["z_loss not finite in 70 steps, from step 31 to step 100"]
    assert health.marks(is_saved=False) == health.marks(is_saved=True) == health.summary()
    assert health.marks(is_saved=True) == [], "the next checkpoint answers for its own steps"
    assert health.summary() != []


def test_a_skipped_step_marks_no_checkpoint(lines: pytest.LogCaptureFixture) -> None:
    health = Health()
    health.observe(1, loss=1.0, grad_norm=math.nan, skipped=True)
    assert _lines(lines) == [] and health.marks(is_saved=True) == [], "the optimizer has said so"
    assert health.summary() == ["grad_norm not finite in step 1"]


def test_a_resumed_run_knows_what_is_usual(lines: pytest.LogCaptureFixture) -> None:
    before, after = Health(), Health()
    for step in range(1, 30):
        before.observe(step, loss=2.0 + 0.01 * (step % 3), grad_norm=0.5, skipped=False)
    after.restore(json.loads(json.dumps(before.to_json())))
    after.observe(30, loss=4.0, grad_norm=500.0, skipped=False)
    assert [line.split(":")[1] for line in _lines(lines)] == [
        " loss far above the usual",
        " grad_norm far above the usual",
    ]
    for stored in (
        {},
        {"recent_values": 7},
        {"recent_values": {"loss": [1, "a"], "grad_norm": 3}},
        {"recent_values": {"loss": [10**400], "grad_norm": [math.nan]}},
    ):
        after.restore(stored)


def test_lines_are_few_however_often_a_value_jumps(lines: pytest.LogCaptureFixture) -> None:
    health, quiet = Health(), Health(speaks=False)
    for step in range(1, 400):
        for one in (health, quiet):
            one.observe(step, loss=math.nan if step % 2 else 1.0, grad_norm=1.0, skipped=False)
    assert len(_lines(lines)) == 5
    assert health.summary() == quiet.summary() == ["loss not finite in 200 steps, from step 1 to step 399"]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_gives_no_false_alarm(lines: pytest.LogCaptureFixture, seed: int) -> None:
    """Warm-up, a steep descent, a plateau with noise, batches of another kind and heavy tails of the norm."""
    rng, health = random.Random(seed), Health()
    for step in range(1, 3000):
        loss = 2.5 + 8.0 * math.exp(-step / 60) + rng.gauss(0, 0.05) + (0.15 if rng.random() < 0.1 else 0.0)
        norm = (0.3 + 5.0 * math.exp(-step / 20)) * math.exp(rng.gauss(0, 0.3)) * (3.0 if rng.random() < 0.02 else 1.0)
        health.observe(step, loss=loss, grad_norm=norm, skipped=False, others={"z_loss": rng.uniform(0.5, 1.5)})
    assert _lines(lines) == [] and health.summary() == []


def test_without_sigma_nothing_is_skipped() -> None:
    health, other = Health(), Health(spike_sigma=4.0)
    for step in range(1, 60):
        observe(health, step)
        observe(other, step)
    assert (health.largest_norm(60), other.largest_norm(60)) == (math.inf, 1.0)


def test_stage_three_cannot_skip_by_size() -> None:
    run = load(["--preset", "mula-tiny", "--zero-stage", "3", "--grad-norm-spike-sigma", "6"]).config
    with pytest.raises(ConfigError, match=r"grad_norm_spike_sigma=6.0 with zero_stage=3: use 0, or zero_stage=1 or 2"):
        check(run, 1)


def timings(*milliseconds: float) -> list[DeviceTime]:
    return [DeviceTime(rank, f"node{rank // 2}", value / 1e3) for rank, value in enumerate(milliseconds)]


def test_the_slow_are_those_beyond_the_median_slowest_first() -> None:
    slow = slow_devices(timings(1.0, 1.09, 1.2, 1.0, 3.0, 1.05))
    assert [t.rank for t in slow] == [4, 2]
    assert describe(slow, 1e-3) == "rank 4 on node2 (3.00x), rank 2 on node1 (1.20x)"
    assert slow_devices(timings(1.0, 1.0)) == [] and describe([], 1e-3) == "none"
    assert [t.rank for t in slow_devices(timings(1.0, 2.0))] == [1], "of two, the slower one"
    assert describe(slow_devices(timings(*[1.0] * 20, *[2.0] * 11)), 1e-3).endswith("(2.00x), and 3 more")


def test_every_rank_is_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("optimus").propagate = True
    caplog.set_level(logging.INFO, "optimus")
    monkeypatch.setattr(health, "time_products", lambda device, dtype: 0.002)
    ranks = Ranks.alone()
    monkeypatch.setattr(ranks, "all_gather_bytes", lambda own: [own, own, b'["other", 0.005]'])
    config = load(["--preset", "mula-tiny"]).config
    mesh = Mesh(config.parallel, rank=0, world_size=1)
    [slow] = check_devices(RunContext(config, mesh, torch.device("cpu"), ranks))
    assert (slow.rank, slow.host, slow.seconds) == (2, "other", 0.005)
    assert "3 ranks took 2.00 ms" in caplog.text and "rank 2 on other (2.50x)" in caplog.text


def test_the_products_take_time() -> None:
    assert 0 < time_products(torch.device("cpu"), torch.bfloat16) < 10
