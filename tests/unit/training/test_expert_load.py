"""Loads of experts over the steps of a run: the file, its history, and the balance that placements would give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError, ExpertPlacement, ParallelConfig
from megatron.optimus.training.expert_load import FILE_NAME, HISTORY_NAME, ExpertLoad, report

LAYOUT = ParallelConfig(expert_model_parallel_size=2)


def history(folder: Path) -> list[tuple[int, int, list[list[int]]]]:
    lines = [json.loads(line) for line in (folder / HISTORY_NAME).read_text().splitlines()]
    return [(line["first_step"], line["step"], line["slots"]) for line in lines]


def test_steps_are_added_up_and_the_history_has_a_line_for_each_share_of_the_run(tmp_path: Path) -> None:
    load = ExpertLoad(tmp_path, LAYOUT, last_step=400)  # a line for every second step
    for step in range(1, 6):
        load.add(step, [[step, 0, 1, 0]])
    load.write()
    found = json.loads((tmp_path / FILE_NAME).read_text())
    assert (found["first_step"], found["step"]) == (1, 5)
    assert found["slots_per_layer_and_expert"] == [[5, 0, 1, 0]]
    assert found["total_slots_per_layer_and_expert"] == [[15, 0, 5, 0]]
    load.close()
    assert history(tmp_path) == [(1, 2, [[3, 0, 2, 0]]), (3, 4, [[7, 0, 2, 0]]), (5, 5, [[5, 0, 1, 0]])]
    resumed = ExpertLoad(tmp_path, LAYOUT, steps_before=4, last_step=400)
    for step in (5, 6):
        resumed.add(step, [[0, 0, 0, step]])
    resumed.close()
    assert history(tmp_path)[2:] == [(5, 6, [[0, 0, 0, 11]])]  # what the steps after the checkpoint had is gone


def test_a_dense_model_has_no_files(tmp_path: Path) -> None:
    load = ExpertLoad(tmp_path, ParallelConfig())
    load.add(1, [])
    load.close()
    assert list(tmp_path.iterdir()) == []


def test_the_balance_of_placements(tmp_path: Path) -> None:
    load = ExpertLoad(tmp_path, LAYOUT)
    load.add(1, [[8, 6, 1, 1], [4, 4, 4, 4]])
    load.add(2, [[4, 4, 1, 3], [4, 4, 4, 4]])
    load.write()
    found = report(tmp_path / FILE_NAME)
    assert (found.first_step, found.last_step, found.num_ranks) == (1, 2, 2)
    skewed, even = found.layers  # 12, 10, 2 and 4 slots of 28
    assert skewed.present == skewed.contiguous == pytest.approx(22 / 14)
    assert skewed.interleaved == pytest.approx(1) and skewed.busiest_expert == pytest.approx(12 / 7)
    assert skewed.balanced == skewed.bound == pytest.approx(1)
    assert even.present == even.balanced == pytest.approx(1)
    assert found.means["present"] == pytest.approx((22 / 14 + 1) / 2)
    last = report(tmp_path / FILE_NAME, 4, last_step_only=True)
    assert (last.first_step, last.num_ranks) == (2, 4)
    assert last.layers[0].balanced == last.layers[0].bound == pytest.approx(4 / 3)
    with pytest.raises(ConfigError, match="3 ranks must divide the 4 experts of a layer; use 1, 2 or 4"):
        report(tmp_path / FILE_NAME, 3)


def test_the_placement_of_the_run_counts_as_present(tmp_path: Path) -> None:
    layout = ParallelConfig(expert_model_parallel_size=2, moe_expert_placement=ExpertPlacement.INTERLEAVED)
    load = ExpertLoad(tmp_path, layout)
    load.add(1, [[8, 6, 1, 1]])
    load.write()
    [layer] = report(tmp_path / FILE_NAME).layers
    assert layer.present == layer.interleaved == pytest.approx(9 / 8) and layer.contiguous == pytest.approx(14 / 8)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"expert_model_parallel_size": "many"}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=f"is no {FILE_NAME} of a run with experts"):
        report(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
        report(tmp_path / "nowhere")
