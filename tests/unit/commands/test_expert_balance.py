"""From a run's expert loads to a report and a placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.config.placement import busiest_over_mean, from_json, to_json
from megatron.optimus.config.schema import ExpertPlacement, ParallelConfig
from megatron.optimus.training.expert_load import ExpertLoad

from .test_preprocess import call

LAST = [[8, 6, 1, 1], [4, 4, 4, 4]]
BEFORE = [[4, 4, 1, 3], [6, 4, 4, 2]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    load = ExpertLoad(tmp_path, ParallelConfig(expert_model_parallel_size=2))
    load.write()
    assert not list(tmp_path.iterdir())  # nothing to say yet
    load.add(11, BEFORE)
    load.add(12, LAST)
    load.write()
    return tmp_path


def test_report_and_placement(run: Path) -> None:
    out, placement = run / "report.json", run / "placement.json"
    result = call("tools/expert_balance.py", run, "--out", out, "--write-placement", placement)
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    first = report["layers"][0]  # 12, 10, 2, 4 of 28
    assert (report["first_step"], report["last_step"], report["num_ranks"]) == (11, 12, 2)
    assert first["present"] == first["contiguous"] == pytest.approx(22 / 14)
    assert first["interleaved"] == pytest.approx(14 / 14) and first["busiest_expert"] == pytest.approx(12 / 7)
    assert first["balanced"] == first["bound"] == pytest.approx(1)
    assert report["mean_over_layers"]["present"] == pytest.approx((22 / 14 + 18 / 16) / 2)
    layers = from_json(placement.read_text(), placement, num_layers=2, num_experts=4, num_ranks=2)
    assert busiest_over_mean([12, 10, 2, 4], layers[0]) == pytest.approx(1)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("steps 11 to 12, experts of a layer over 2 ranks")
    assert lines[2].split() == ["0", "1.714", "1.571", "1.571", "1.000", "1.000", "1.000"]
    assert lines[4].startswith(" mean") and "25.8% less to compute" in lines[5]


def test_other_steps_and_ranks(run: Path) -> None:
    result = call("tools/expert_balance.py", run / "expert_load.json", "--last-step", "--ranks", 4)
    assert result.returncode == 0, result.stderr
    assert "steps 12 to 12, experts of a layer over 4 ranks" in result.stdout
    assert result.stdout.splitlines()[2].split()[1:] == ["2.000"] * 6  # one expert a rank: nothing to move


def test_the_placement_of_the_run_is_the_present_one(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(to_json([((0, 1), (2, 3)), ((0, 3), (1, 2))]))
    config = ParallelConfig(
        expert_model_parallel_size=2,
        moe_expert_placement=ExpertPlacement.INTERLEAVED,
        moe_expert_placement_file=str(file),
    )
    load = ExpertLoad(tmp_path, config)
    load.add(1, LAST)
    load.write()
    lines = call("tools/expert_balance.py", tmp_path).stdout.splitlines()
    assert lines[2].split()[2:5] == ["1.750", "1.750", "1.125"]


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    good = json.loads((run / "expert_load.json").read_text())
    (tmp_path / "ragged.json").write_text(json.dumps(good | {"total_slots_per_layer_and_expert": [[1, 2], [3]]}))
    del good["moe_expert_placement_file"]
    (tmp_path / "older.json").write_text(json.dumps(good))
    for arguments, message in (
        ([run, "--ranks", 3], "3 ranks must divide the 4 experts of a layer; use 1, 2 or 4"),
        ([run, "--write-placement", "/dev/null/x"], "/dev/null/x cannot be written: Not a directory"),
        ([tmp_path / "ragged.json"], "layers of different numbers of experts"),
        ([tmp_path / "older.json"], "KeyError: 'moe_expert_placement_file'"),
        ([tmp_path / "nowhere"], "nowhere cannot be read: No such file or directory; name an"),
        ([run, "--out", "/dev/full"], "/dev/full cannot be written: No space left on device"),
        ([tmp_path / "empty.json"], "KeyError"),
    ):
        result = call("tools/expert_balance.py", *arguments)
        assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
