"""Writers of the step metrics besides metrics.jsonl."""

from __future__ import annotations

import dataclasses

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.observe.metrics import StepMetrics


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
        for name, value in dataclasses.asdict(metrics).items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
