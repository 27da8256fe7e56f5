"""The tracker that sends metrics to Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.optimus.config.serialize import to_dict
from megatron.optimus.context import RunContext
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


def open_tracker(run: RunContext, steps: StepRange) -> WandbTracker | None:
    """A tracker that sends to ``wandb_project``; None without one."""
    options = run.config.logging
    if not options.wandb_project:
        return None
    return WandbTracker(options.wandb_project, options.wandb_exp_name, Path(options.run_dir), to_dict(run.config))


class WandbTracker(Tracker):
    """Every number of a step in a run of Weights & Biases; a resumed run continues its run there."""

    def __init__(self, project: str, name: str | None, run_dir: Path, config: dict[str, Any]) -> None:
        """Raises ConfigError without the wandb package."""
        require_package("wandb", f"wandb_project={project!r}", "pip install wandb (extra [wandb])")
        self._project, self._name, self._run_dir, self._config = project, name or run_dir.name, run_dir, config

    def open(self) -> None:
        import wandb

        self._run_dir.mkdir(parents=True, exist_ok=True)
        kept = self._run_dir / "wandb_run_id"
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            dir=str(self._run_dir),
            config=self._config,
            id=kept_id(kept),
            resume="allow",
        )
        write_atomically(kept, self._run.id + "\n", sync=False)

    def log(self, metrics: StepMetrics) -> None:
        self._run.log(numbers(metrics), step=metrics.step)

    def alert(self, alert: Alert) -> None:
        self._run.alert(title=alert.kind, text=f"step {alert.step}: {alert.text}", level="WARN")

    def add_files(self, run_dir: Path) -> None:
        import wandb

        if (table := read_samples(run_dir)) is not None:
            self._run.log({"samples": wandb.Table(columns=list(table[0]), data=table[1])})
        if page := read_text(run_dir / REPORT):
            self._run.log({"report": wandb.Html(page, inject=False)})

    def close(self) -> None:
        self._run.finish()
