"""The share of effective time against a simulation of failures, and what the table says."""

import math
import random

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import AURORA
from megatron.optimus.planner.reliability import (
    Recovery,
    best_interval,
    effective_share,
    effective_time,
    predict,
    spares_needed,
)


def simulated_share(interval: float, recovery: Recovery, mtbf: float, failures: int, seed: int) -> float:
    """Plays a run second by second of its events: work, stalls, copies that become durable later, and failures."""
    draw = random.Random(seed)
    durable, position, clock = 0.0, 0.0, 0.0
    pending: list[tuple[float, float]] = []  # (when it is durable, its position)
    since_save = 0.0
    failure = draw.expovariate(1 / mtbf)
    while failures:
        # The next event of an undisturbed run: the end of the stretch of work and its stall.
        end = clock + (interval - since_save) + recovery.stall
        if end <= failure:
            position += interval - since_save
            since_save, clock = 0.0, end
            pending.append((clock + recovery.durable_after, position))
            continue
        failures -= 1
        for when, saved in pending:
            durable = saved if when <= failure else durable
        pending, position, since_save, clock = [], durable, 0.0, failure
        while True:  # restarts, which may fail too
            failure = clock + draw.expovariate(1 / mtbf)
            if failure >= clock + recovery.restart:
                clock += recovery.restart
                break
            failures, clock = max(0, failures - 1), failure
    return durable / clock


@pytest.mark.parametrize(
    "interval, recovery, mtbf",
    [
        (300.0, Recovery("", 20.0, 0.0, 120.0), 3600.0),
        (600.0, Recovery("", 5.0, 300.0, 400.0), 3600.0),  # written slowly: two thirds of an interval may be lost more
        (30.0, Recovery("", 0.5, 10.0, 40.0), 600.0),
        (900.0, Recovery("", 60.0, 60.0, 900.0), 1800.0),  # a machine on which hardly anything works
    ],
)
def test_the_share_is_that_of_a_simulation(interval: float, recovery: Recovery, mtbf: float) -> None:
    found = sum(simulated_share(interval, recovery, mtbf, 20_000, seed) for seed in range(3)) / 3
    assert effective_share(interval, recovery, mtbf) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("stall, mtbf", [(0.2, 3600.0), (20.0, 3600.0), (60.0, 1800.0)])
def test_no_other_interval_is_better_by_more_than_a_thousandth(stall: float, mtbf: float) -> None:
    recovery, best = Recovery("", stall, 0.0, 100.0), best_interval(stall, mtbf)
    found = effective_share(best, recovery, mtbf)
    assert all(
        effective_share(best * factor, recovery, mtbf) < found * 1.001 for factor in (0.5, 0.8, 0.95, 1.05, 1.5, 3)
    )
    assert best == pytest.approx(math.sqrt(2 * stall * mtbf), rel=0.2)  # Young's


def test_an_interval_is_no_shorter_than_its_checkpoint_takes() -> None:
    assert predict(Recovery("", 0.2, 500.0, 10.0), 3600.0, 1.0).interval == 500.0
    assert predict(Recovery("", 0.0001, 0.0, 10.0), 3600.0, 5.0).interval == 5.0
    assert effective_share(1e9, Recovery("", 1.0, 0.0, 1.0), 1.0) == 0.0


def test_spares_are_enough_in_ninety_nine_of_a_hundred_days() -> None:
    draw, nodes, mtbf = random.Random(7), 1024, 6300 * 3600.0
    spares = spares_needed(nodes, mtbf)
    days = [sum(draw.random() < -math.expm1(-86400 / mtbf) for _ in range(nodes)) for _ in range(2000)]
    assert sum(lost <= spares for lost in days) / 2000 > 0.985
    assert sum(lost <= spares - 1 for lost in days) / 2000 < 0.99


def test_recovery_in_memory_is_best_and_large_jobs_are_hit_hardest() -> None:
    rows = effective_time(load(["--preset", "mula-220b-a10b"], "plan").config, AURORA, 6300.0)
    assert [row.nodes for row in rows] == [32, 64, 128, 256, 512, 1024]
    for row in rows:
        disk, launcher, memory = (one.share for one in row.predictions)
        assert 0 < disk < launcher < memory < 1
    shares = [row.predictions[2].share for row in rows]
    assert shares == sorted(shares, reverse=True)
