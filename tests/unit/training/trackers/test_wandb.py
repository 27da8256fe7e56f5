"""Weights & Biases, by its own library in offline mode: its file has what was logged, and a resumed run goes on."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.trackers import BackgroundTracker
from megatron.optimus.training.trackers.wandb import WandbTracker
from tests.unit.training.test_metrics import metrics

_BLOCK = 32768


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file, which has LevelDB's log format after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:
            position += _BLOCK - position % _BLOCK
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_the_library_gets_every_number_alerts_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "samples.jsonl").write_text('{"step": 7, "text": "one"}\n{"step": 8, "text": "<b>two"}\n')
    (run_dir / "report.html").write_text("<p>the report</p>")
    for step in (7, 8):  # two processes of one run
        tracker = BackgroundTracker(WandbTracker("moe", None, run_dir, {"model": {"num_layers": 2}}))
        tracker.log(metrics(step, valid_loss=3.5, valid_losses={"web": 2.5}, task_scores={"science/acc": 0.5}))
        tracker.alert(Alert("loss_spike", step, "9 after 2", str(run_dir)))
        tracker.add_files(run_dir)
        tracker.close()
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    found = [list(records(file)) for file in files]
    assert len(found) == 2
    for step, own in zip((7, 8), found, strict=True):
        runs = [record.run for record in own if record.HasField("run")]
        assert {run.run_id for run in runs} == {(run_dir / "wandb_run_id").read_text().strip()}
        assert (runs[0].project, runs[0].display_name) == ("moe", "first")
        history = [record.history for record in own if record.HasField("history")]
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history[0].item}
        assert items["_step"] == step and items["valid_loss/web"] == 2.5 and items["task/science/acc"] == 0.5
        assert "mfu" not in items, "what is not applicable is left out"
        alerts = [record.alert for record in own if record.HasField("alert")]
        assert [(alert.title, alert.text) for alert in alerts] == [("loss_spike", f"step {step}: 9 after 2")]
    folder = files[0].parent / "files/media"
    [table] = folder.glob("table/*.json")
    assert json.loads(table.read_text())["data"] == [[7, "one"], [8, "<b>two"]]
    [page] = folder.glob("html/*.html")
    assert "the report" in page.read_text()


def test_wandb_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb_project='moe' needs a package .*pip install wandb"):
        WandbTracker("moe", None, tmp_path, {})
