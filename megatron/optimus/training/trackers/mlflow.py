"""MLflow, by its client alone (package mlflow-skinny): a server, or a folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megatron.optimus.config.serialize import to_dict
from megatron.optimus.context import RunContext
from megatron.optimus.platform.environment import set_default
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.report.page import FILE_NAME as REPORT
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.metrics import StepMetrics, numbers
from megatron.optimus.training.trackers import StepRange, Tracker, kept_id, read_samples, require_package

_MOST_PARAMS, _LONGEST_VALUE = 100, 500  # of one call of MLflow, and characters of a parameter in older stores


def open_tracker(run: RunContext, steps: StepRange) -> MlflowTracker | None:
    """A tracker that sends to ``mlflow_uri``; None without one."""
    options = run.config.logging
    if not options.mlflow_uri:
        return None
    run_dir = Path(options.run_dir)
    name = options.mlflow_run_name or run_dir.name
    return MlflowTracker(options.mlflow_uri, options.mlflow_experiment, name, run_dir, to_dict(run.config))


class MlflowTracker(Tracker):
    """Every number of a step in a run of MLflow; a resumed run continues its run there."""

    def __init__(self, uri: str, experiment: str, name: str, run_dir: Path, config: dict[str, Any]) -> None:
        """Raises ConfigError without the package."""
        require_package("mlflow", f"mlflow_uri={uri!r}", "pip install mlflow-skinny (extra [mlflow])")
        self._uri, self._experiment, self._name, self._run_dir, self._config = uri, experiment, name, run_dir, config

    def open(self) -> None:
        if not self._uri.partition("://")[1] or self._uri.startswith("file:"):
            set_default("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask whether a folder is meant
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(tracking_uri=self._uri)
        kept = self._run_dir / "mlflow_run_id"
        self._id = kept_id(kept) or ""
        if self._id:
            try:
                client.update_run(self._id, status="RUNNING")
                return
            except MlflowException:  # deleted there, or of another server
                self._id = ""
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = client.create_run(experiment, run_name=self._name).info.run_id
        write_atomically(kept, self._id + "\n", sync=False)
        options = {f"{part}.{name}": value for part, own in self._config.items() for name, value in own.items()}
        params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in options.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, metrics: StepMetrics) -> None:
        from mlflow.entities import Metric

        now = round(metrics.wall_time * 1000)
        found = [Metric(name, float(value), now, metrics.step) for name, value in numbers(metrics).items()]
        self._client.log_batch(self._id, metrics=found)

    def alert(self, alert: Alert) -> None:
        self._client.set_tag(self._id, f"alert.{alert.kind}", f"step {alert.step}: {alert.text}")

    def add_files(self, run_dir: Path) -> None:
        if (table := read_samples(run_dir)) is not None:
            self._client.log_dict(self._id, {"columns": table[0], "data": table[1]}, "samples.json")
            shown = [{"path": "samples.json", "type": "table"}]
            self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps(shown))
        if (run_dir / REPORT).is_file():
            self._client.log_artifact(self._id, str(run_dir / REPORT))

    def close(self) -> None:
        self._client.set_terminated(self._id, end_time=round(time.time() * 1000))
