"""Comet, by its own library in offline mode: its archive has what was logged, and a resumed run has the same key."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.trackers import BackgroundTracker
from megatron.optimus.training.trackers.comet import CometTracker
from tests.unit.training.test_metrics import metrics


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """An archive's experiment, its messages by kind, and the text of its files by name."""
    with zipfile.ZipFile(path) as archive:
        kinds: dict[str, list[dict[str, Any]]] = {}
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            kinds.setdefault(message["type"], []).append(message["payload"])
        files = {one["additional_params"]["fileName"]: one["file_path"] for one in kinds.get("file_upload", [])}
        texts = {name: archive.read(stored).decode() for name, stored in files.items()}
        return json.loads(archive.read("experiment.json")), kinds, texts


def test_the_library_gets_every_number_alerts_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "samples.jsonl").write_text('{"step": 7, "text": "one"}\n{"step": 8, "text": "<b>two"}\n')
    (run_dir / "report.html").write_text("<p>the report</p>")
    found = []
    for step in (7, 8):  # two processes of one run
        before = {*run_dir.glob("comet/*.zip")}
        tracker = BackgroundTracker(CometTracker("moe", None, run_dir, {"model": {"num_layers": 2}}))
        tracker.log(metrics(step, valid_loss=3.5, valid_losses={"web": 2.5}, task_scores={"science/acc": 0.5}))
        tracker.alert(Alert("loss_spike", step, "9 after 2", str(run_dir)))
        tracker.add_files(run_dir)
        tracker.close()
        [path] = {*run_dir.glob("comet/*.zip")} - before
        found.append(read(path))
    key = (run_dir / "comet_experiment_key").read_text().strip()
    for step, (experiment, kinds, texts) in zip((7, 8), found, strict=True):
        assert (experiment["offline_id"], experiment["project_name"]) == (key, "moe")
        logged = {
            (one["metric"]["metricName"], one["metric"]["step"]): one["metric"]["metricValue"]
            for one in kinds["metric_msg"]
        }
        assert logged["valid_loss/web", step] == 2.5 and logged["task/science/acc", step] == 0.5
        assert ("mfu", step) not in logged, "what is not applicable is left out"
        params = {one["param"]["paramName"]: one["param"]["paramValue"] for one in kinds["parameter_msg"]}
        assert params["model|num_layers"] == 2
        others = {one["key"]: one["value"] for one in kinds["log_other"]}
        assert others["alert.loss_spike"] == f"step {step}: 9 after 2" and others["Name"] == "first"
        assert [one["htmlOverride"] for one in kinds["htmlOverride"]] == ["<p>the report</p>"]
        assert "one" in texts["samples.csv"] and "<b>two" in texts["samples.csv"]


def test_comet_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"comet_project='moe' needs a package .*pip install comet_ml"):
        CometTracker("moe", None, tmp_path, {})
