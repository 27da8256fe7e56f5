"""Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.context import RunContext
from megatron.optimus.platform.files import open_regular, write_atomically
from megatron.optimus.training.metrics import StepMetrics, numbers
from megatron.optimus.training.trackers import StepRange


def open_tracker(run: RunContext, steps: StepRange) -> WandbTracker | None:
    """A tracker that sends to ``wandb_project``; None without one."""
    options = run.config.logging
    if not options.wandb_project:
        return None
    return WandbTracker(options.wandb_project, options.wandb_exp_name, Path(options.run_dir), to_dict(run.config))


class WandbTracker:
    """Every number of a step in a run of Weights & Biases; a resumed run continues its run there."""

    def __init__(self, project: str, name: str | None, run_dir: Path, config: dict[str, Any]) -> None:
        """Raises ConfigError without the wandb package, and wandb's own errors where it cannot begin a run."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"wandb_project={project!r} needs a package that is not installed: pip install wandb (extra [wandb])"
            ) from error
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = run_dir / "wandb_run_id"
        run_id = None
        if kept.exists():
            with open(open_regular(kept, os.O_RDONLY), encoding="utf-8") as file:
                run_id = file.read().strip()
        self._run = wandb.init(
            project=project, name=name or run_dir.name, dir=str(run_dir), id=run_id, resume="allow", config=config
        )
        write_atomically(kept, self._run.id + "\n", sync=False)

    def log(self, metrics: StepMetrics) -> None:
        self._run.log(numbers(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()
