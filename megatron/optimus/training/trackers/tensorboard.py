"""TensorBoard."""

from __future__ import annotations

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.training.metrics import StepMetrics, numbers
from megatron.optimus.training.trackers import StepRange


def open_tracker(run: RunContext, steps: StepRange) -> TensorBoardTracker | None:
    """A tracker that writes to ``tensorboard_dir``; None without one."""
    folder = run.config.logging.tensorboard_dir
    return TensorBoardTracker(folder, steps.first) if folder else None


class TensorBoardTracker:
    """Every number of a step as a TensorBoard scalar. Only rank 0 may create one."""

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        """Events after ``resume_step`` in the folder are hidden. Raises ConfigError without the tensorboard package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir={folder!r} needs a package that is not installed: pip install tensorboard "
                "(extra [tensorboard])"
            ) from error
        self._writer = SummaryWriter(folder, purge_step=resume_step + 1)

    def log(self, metrics: StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
