"""Writers of the step metrics besides metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.metrics import StepMetrics, flat


class Tracker(Protocol):
    """Takes every step once, in order. Only rank 0 may create one."""

    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Every number of a step as a TensorBoard scalar. Only rank 0 may create one."""

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        """Events after ``resume_step`` in the folder are hidden. Raises ConfigError without the tensorboard package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir={folder!r} needs a package that is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(folder, purge_step=resume_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Every number of a step in a run of Weights & Biases, which a resumed run of ours continues."""

    def __init__(self, project: str, name: str | None, run_dir: Path, config: dict[str, Any]) -> None:
        """Raises ConfigError without the wandb package; what wandb itself raises where it cannot begin."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"wandb_project={project!r} needs a package that is not installed: pip install wandb"
            ) from error
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = run_dir / "wandb_run_id"
        run_id = kept.read_text().strip() if kept.exists() else None
        self._run = wandb.init(
            project=project, name=name or run_dir.name, dir=str(run_dir), id=run_id, resume="allow", config=config
        )
        kept.write_text(self._run.id + "\n")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(_numbers(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


def _numbers(metrics: StepMetrics) -> dict[str, float]:
    return {name: value for name, value in flat(metrics).items() if value is not None and name != "step"}
