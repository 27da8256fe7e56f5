"""Folders of runs: whole, unfinished, damaged, growing, cut, of version 0.5, and folders that are none."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.report import read
from megatron.optimus.report.read import MetricsTail, read_run
from megatron.optimus.training import expert_load, metrics

from .conftest import line, write_lines

OLD = Path(__file__).parents[2] / "fixtures" / "checkpoint_v0_5"


def test_the_files_have_the_names_under_which_training_writes_them() -> None:
    assert (read.METRICS, read.EXPERT_LOAD) == (metrics.FILE_NAME, expert_load.FILE_NAME)
    assert read.EXPERT_HISTORY == expert_load.HISTORY_NAME


def test_a_whole_run(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run())
    assert run.notes == [] and run.metrics.steps.tolist() == list(range(1, 13))
    assert run.metrics.column("loss")[1] == 6.0 and math.isnan(run.metrics.column("loss")[5])
    assert run.config["model"]["num_experts"] == 4 and len(run.experts) == 6 and run.samples[0]["step"] == 4
    [checkpoint] = run.checkpoints
    assert (checkpoint.step, checkpoint.num_bytes, checkpoint.layout) == (8, 1500, "dp=2")
    assert checkpoint.warnings == ["loss"]


def test_a_run_of_version_0_5() -> None:
    run = read_run(OLD)
    assert len(run.metrics.steps) > 4 and run.notes == [] and np.isnan(run.metrics.column("wall_time")).all()
    assert [one.step for one in run.checkpoints] == [4] and run.config["model"]["hidden_size"] == 16


def test_damage_is_left_out_and_noted(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    text = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = [
        b'{"step": 1}, {"step": 2}\n',
        b"\0\0\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"step": true}\n',
        b"\n",
        b"[" * 9999 + b"\n",
    ]
    odd = [b'{"step": 13, "loss": "text", "grad_norm": [1], "lr": 1e999, "aux_loss": 1%s}\n' % (b"0" * 400)]
    (folder / "metrics.jsonl").write_bytes(b"".join([*text[:3], *bad, *text[3:], *odd, b'{"step": 14, "lo']))
    (folder / "expert_load_history.jsonl").write_text(
        '{"step": 1}\nx\n{"first_step": 1, "step": 2, "slots": [[1], [2, 3]]}\n'
    )
    (folder / "config.yaml").write_text("model: [\n")
    (folder / "samples.jsonl").write_text('{"step": 1}\n3\n')
    (folder / "checkpoints" / "step-00000008" / "manifest.json").write_text("{")
    run = read_run(folder)
    assert run.metrics.steps.tolist() == list(range(1, 14)) and run.metrics.num_damaged == len(bad)
    assert all(math.isnan(run.metrics.column(key)[12]) for key in ("loss", "grad_norm", "lr", "aux_loss"))
    assert run.experts == [] and run.samples == [] and run.config == {} and run.checkpoints[0].num_bytes is None
    assert "7 damaged" in run.notes[0] and any("not valid YAML" in note for note in run.notes)


def test_without_a_history_the_totals_of_the_last_process_count(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "expert_load_history.jsonl").unlink()
    record = {"step": 12, "first_step": 9, "total_slots_per_layer_and_expert": [[1, 2], [3, 4]]}
    (folder / "expert_load.json").write_text(json.dumps(record))
    [row] = read_run(folder).experts
    assert (row.first_step, row.step, row.slots_LE.tolist()) == (9, 12, [[1, 2], [3, 4]])


def test_folders_that_are_no_run(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    make_run("one")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "none", "no such folder"), (tmp_path / "file", "is a file"), (tmp_path, "runs one")):
        with pytest.raises(ConfigError, match=said):
            read_run(path)
    with pytest.raises(ConfigError, match="has neither"):
        read_run(tmp_path / "empty")
    (tmp_path / "empty" / "config.yaml").touch()
    assert "no step was logged yet" in read_run(tmp_path / "empty").notes[0]


def test_a_file_that_grows_is_read_on_and_one_that_was_cut_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [line(1), line(2)])
    tail = MetricsTail(path)
    assert tail.poll() and not tail.poll()
    whole = json.dumps(line(3, extra=7.0)) + "\n"
    with path.open("a") as file:
        file.write(whole[:20])
        file.flush()
        assert not tail.poll()
        file.write(whole[20:])
    assert tail.poll() and tail.steps.tolist() == [1, 2, 3] and tail.column("extra")[2] == 7.0
    assert math.isnan(tail.column("extra")[0])
    os.truncate(path, len(json.dumps(line(1))) + 1)  # of the same file
    assert tail.poll() and tail.steps.tolist() == [1]
    write_lines(tmp_path / "new", [line(1, loss=1.0), line(2), line(3)])
    os.rename(tmp_path / "new", path)  # as a resumed run does
    assert tail.poll() and tail.steps.tolist() == [1, 2, 3] and tail.column("loss")[0] == 1.0
    write_lines(path, [line(step, loss=9.0) for step in range(1, 9)])  # written over, and longer
    assert tail.poll() and tail.column("loss").tolist() == [9.0] * 8
