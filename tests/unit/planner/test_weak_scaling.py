"""Weak scaling: it falls and levels off, and the documents' curve is what is planned today."""

from __future__ import annotations

from megatron.optimus.config.load import load
from megatron.optimus.planner.hardware import AURORA
from megatron.optimus.planner.weak_scaling import PAPER, table, weak_scaling, with_paper_settings
from tests.unit.planner.test_plan import ROOT
from tests.unit.planner.test_step_time import PAGE


def test_weak_scaling_falls_and_levels_off() -> None:
    points = weak_scaling(load("--preset mula-220b-a10b".split()).config, AURORA)
    efficiencies = [point.efficiency for point in points]
    assert [point.plan.world_size for point in points] == list(PAPER)
    assert efficiencies[0] == 1.0
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[-1] > 0.85
    assert all(point.plan.ranks[0].micro_batches == 8 for point in points)


def test_the_documents_curve_is_the_raw_files() -> None:
    raw = (ROOT / "benchmarks/results/weak_scaling_220b_aurora_model.md").read_text()
    assert raw in PAGE.read_text()
    config = load("--preset mula-220b-a10b".split()).config
    curves = {"": weak_scaling(with_paper_settings(config), AURORA), " ": weak_scaling(config, AURORA)}
    assert table(curves).splitlines()[2:] == raw.splitlines()[2:], "run optimus plan --weak-scaling again"
