"""MLflow, by its own client and a folder as its store; and what every tracker shares."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.metrics import StepMetrics
from megatron.optimus.training.trackers import BackgroundTracker, Tracker, read_samples
from megatron.optimus.training.trackers.mlflow import MlflowTracker
from tests.unit.training.test_metrics import metrics


def test_the_store_gets_every_number_alerts_and_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    run_dir, store = tmp_path / "first", str(tmp_path / "mlruns")
    run_dir.mkdir()
    (run_dir / "samples.jsonl").write_text('{"step": 7, "text": "one"}\n')
    (run_dir / "report.html").write_text("<p>the report</p>")
    for step in (7, 8):  # two processes of one run
        tracker = BackgroundTracker(MlflowTracker(store, "moe", "named", run_dir, {"model": {"num_layers": 2}}))
        tracker.log(metrics(step, valid_losses={"web": 2.5}, task_scores={"science/exact_match/strict": 0.5}))
        tracker.alert(Alert("loss_spike", step, "9 after 2", str(run_dir)))
        tracker.add_files(run_dir)
        tracker.close()
    assert not caplog.records, caplog.text
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("moe")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == ("named", "FINISHED", {"model.num_layers": "2"})
    history = client.get_metric_history(run.info.run_id, "task/science/exact_match/strict")
    assert [(one.step, one.value) for one in history] == [(7, 0.5), (8, 0.5)]
    assert run.data.metrics["valid_loss/web"] == 2.5 and "mfu" not in run.data.metrics
    assert run.data.tags["alert.loss_spike"] == "step 8: 9 after 2"
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"samples.json", "report.html"}
    table = json.loads(next((tmp_path / "mlruns").rglob("samples.json")).read_text())
    assert table == {"columns": ["step", "text"], "data": [[7, "one"]]}


def test_mlflow_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"mlflow_uri='runs' needs a package .*pip install mlflow-skinny"):
        MlflowTracker("runs", "moe", "named", tmp_path, {})


class Hanging(Tracker):
    def __init__(self) -> None:
        self.is_free, self.steps = threading.Event(), list[int]()

    def open(self) -> None:
        self.is_free.wait()

    def log(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)
        raise OSError("the service\nis out of reach")


def test_a_tracker_that_hangs_or_fails_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()
    tracker = BackgroundTracker(hanging, closing_seconds=0.2)
    began = time.monotonic()
    for _ in range(10_010):
        tracker.log(metrics(1))
    tracker.close()
    assert time.monotonic() - began < 30 and hanging.steps == []
    assert "Hanging does not keep up" in caplog.text and "Hanging has not ended within 0.2 s" in caplog.text
    caplog.clear()
    hanging.is_free.set()
    failing = Hanging()
    failing.is_free.set()
    tracker = BackgroundTracker(failing)
    for step in (1, 2):
        tracker.log(metrics(step))
    tracker.close()
    assert failing.steps == [1, 2], "an error is no reason to leave out the next step"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "Hanging: the service; training goes on" in errors


class Failing(Tracker):
    logged = 0

    def open(self) -> None:
        raise ValueError("no key")

    def log(self, metrics: StepMetrics) -> None:
        self.logged += 1


def test_a_tracker_that_cannot_connect_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    tracker = BackgroundTracker(failing)
    tracker.log(metrics(1))
    tracker.close()
    assert failing.logged == 0, "it is not open"
    assert [record.getMessage() for record in caplog.records] == ["Failing: no key; training goes on"]


def test_samples_are_a_table_of_their_fields(tmp_path: Path) -> None:
    assert read_samples(tmp_path) is None
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "tokens": [1, 2]}\nnot JSON\n[1]\n{"text": "b"}\n')
    assert read_samples(tmp_path) == (["step", "tokens", "text"], [[1, "[1, 2]", None], [None, None, "b"]])
