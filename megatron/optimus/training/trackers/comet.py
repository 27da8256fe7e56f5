"""The tracker that sends metrics to Comet."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from megatron.optimus.config.serialize import to_dict
from megatron.optimus.context import RunContext
from megatron.optimus.platform.environment import set_default
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.report.page import FILE_NAME as REPORT
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.metrics import StepMetrics, numbers
from megatron.optimus.training.trackers import (
    StepRange,
    Tracker,
    kept_id,
    read_samples,
    read_text,
    require_package,
)

# What the library would collect by itself besides.
_LEFT_OUT = (
    *("auto_metric_logging", "auto_param_logging", "auto_output_logging", "log_code", "log_graph"),
    *("log_git_metadata", "log_git_patch", "log_env_details"),
)


def open_tracker(run: RunContext, steps: StepRange) -> CometTracker | None:
    """A tracker that sends to ``comet_project``; None without one."""
    options = run.config.logging
    if not options.comet_project:
        return None
    return CometTracker(options.comet_project, options.comet_exp_name, Path(options.run_dir), to_dict(run.config))


class CometTracker(Tracker):
    """Every number of a step in an experiment of Comet; a resumed run continues its experiment there.

    Without an API key the experiment is an archive in the run's folder, for ``comet upload``.
    """

    def __init__(self, project: str, name: str | None, run_dir: Path, config: dict[str, Any]) -> None:
        """Raises ConfigError without the comet_ml package."""
        require_package("comet_ml", f"comet_project={project!r}", "pip install comet_ml (extra [comet])")
        self._project, self._name, self._run_dir, self._config = project, name or run_dir.name, run_dir, config

    def open(self) -> None:
        set_default("COMET_DISABLE_AUTO_LOGGING", "1")  # it would replace functions of torch
        import comet_ml

        folder = self._run_dir / "comet"
        folder.mkdir(parents=True, exist_ok=True)
        kept = self._run_dir / "comet_experiment_key"
        key = kept_id(kept) or uuid.uuid4().hex
        options: dict[str, Any] = dict.fromkeys(_LEFT_OUT, False)
        self._experiment = comet_ml.start(
            project_name=self._project,
            experiment_key=key,
            mode="get_or_create",
            online=None if comet_ml.get_config("comet.api_key") else False,  # without a key it would ask for one
            experiment_config=comet_ml.ExperimentConfig(
                name=self._name, offline_directory=str(folder), display_summary_level=0, **options
            ),
        )
        write_atomically(kept, key + "\n", sync=False)
        self._experiment.log_parameters(self._config)

    def log(self, metrics: StepMetrics) -> None:
        self._experiment.log_metrics(numbers(metrics), step=metrics.step)

    def alert(self, alert: Alert) -> None:
        self._experiment.log_other(f"alert.{alert.kind}", f"step {alert.step}: {alert.text}")

    def add_files(self, run_dir: Path) -> None:
        if (table := read_samples(run_dir)) is not None:
            self._experiment.log_table("samples.csv", table[1], headers=table[0])
        if page := read_text(run_dir / REPORT):
            self._experiment.log_html(page, clear=True)

    def close(self) -> None:
        self._experiment.end()
