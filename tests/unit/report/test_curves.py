"""Curves that keep every spike, and the accounting of time, by hand."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.report import curves
from megatron.optimus.report.read import ExpertRow, MetricsTail, read_run

from .conftest import START, line, write_lines

OLD = Path(__file__).parents[2] / "fixtures" / "checkpoint_v0_5"


def test_a_long_run_keeps_its_lowest_and_highest_steps(tmp_path: Path) -> None:
    lines = [line(step, loss=2.0) for step in range(1, 20_002)]
    lines[12_345]["loss"], lines[777]["loss"], lines[-1]["valid_loss"] = 50.0, -3.0, 2.5
    write_lines(tmp_path / "metrics.jsonl", lines)
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.poll()
    found = curves.curves(tail)
    loss, steps = found["lines"]["loss"], found["axes"]["step"]
    assert len(loss["mean"]) == len(loss["low"]) == len(steps) == curves.MOST_POINTS and steps[-1] == 20_001
    assert max(loss["high"]) == 50.0 and min(loss["low"]) == -3.0
    group = loss["high"].index(50.0)
    assert steps[group - 1] < 12_346 <= steps[group]
    sizes = np.diff([0, *steps])
    assert np.dot(loss["mean"], sizes) == pytest.approx(2.0 * 19_999 + 50 - 3, rel=1e-4)
    assert found["points"]["valid_loss"] == {
        "value": [2.5], "step": [20_001], "tokens": [20_001_000], "flops": [160_010_000_000_000], "hours": [11.112]
    }  # fmt: skip


def test_axes_and_points_of_a_short_run(make_run: Callable[..., Path]) -> None:
    found = curves.curves(read_run(make_run()).metrics)
    assert found["axes"]["tokens"][:2] == [1000, 2000] and found["axes"]["flops"][0] == 1000 * 8e6
    assert found["axes"]["hours"][-1] == pytest.approx(24 / 3600)
    assert found["lines"]["loss"]["mean"][5] is None and "low" not in found["lines"]["loss"]
    assert found["lines"]["data_wait_share"]["mean"] == [0.25] * 12 and "z_loss" not in found["lines"]
    assert found["points"]["valid_loss"]["step"] == [4]


def test_where_the_time_went(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run())
    spent = curves.time_spent(run.metrics)
    assert spent is not None
    assert spent["begin"] == START - 10  # of the process: its first step ended at START + 2
    seconds = {"steps": 18.0, "waiting for data": 6.0, "validation, checkpoints, checks": 0.0}
    seconds |= {"starts": 40.0, "lost work": 6.0, "stopped": 100.0, "other": 0.0}
    assert spent["seconds"] == pytest.approx(seconds) and spent["whole_s"] == pytest.approx(170.0)
    assert spent["ettr"] == pytest.approx(24 / 170)
    assert [one["step"] for one in spent["starts"]] == [1, 9] and spent["starts"][1]["lost_steps"] == 3
    kinds = [(mark["kind"], mark["step"]) for mark in curves.marks(run.metrics)]
    assert kinds == [("restart", 9), ("skipped", 6), ("nonfinite", 6)]
    assert curves.num_devices(run.metrics) == 4  # 1000 tokens in 2 s, 125 tokens/s each


def test_a_run_without_times_of_day_has_no_such_account(tmp_path: Path) -> None:
    metrics = read_run(OLD).metrics
    assert curves.time_spent(metrics) is None and curves.num_devices(metrics) == 2
    assert curves.curves(metrics)["axes"]["hours"][-1] > 0
    empty = MetricsTail(tmp_path)
    assert curves.time_spent(empty) is None and curves.curves(empty)["axes"] == {} and curves.marks(empty) == []


def test_loads_of_experts_are_multiples_of_the_mean() -> None:
    rows = [ExpertRow(step, step, np.array([[step, 4.0 - step, 0.0, 4.0], [2.0] * 4])) for step in (1, 2, 3)]
    maps = curves.expert_maps(rows)
    assert maps is not None and maps["steps"] == [1, 2, 3] and maps["num_experts"] == 4
    assert maps["busiest"] == [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    first = np.frombuffer(base64.b64decode(maps["load"][0]), np.uint8).reshape(4, 3)
    assert first.tolist() == [[104, 128, 142], [142, 128, 104], [0, 0, 0], [152, 152, 152]]  # 0.5, 1, 1.5; 2 and 0
    many = curves.expert_maps([ExpertRow(s, s, np.full((2, 3), 1.0 + s)) for s in range(1000)])
    assert many is not None and len(many["steps"]) == 120 and many["steps"][-1] == 999
    assert curves.expert_maps([]) is None
