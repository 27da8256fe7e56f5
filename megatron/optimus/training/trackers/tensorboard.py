"""The tracker that writes TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.context import RunContext
from megatron.optimus.report.read import SAMPLES
from megatron.optimus.training.alerts import Alert
from megatron.optimus.training.metrics import StepMetrics, numbers
from megatron.optimus.training.trackers import StepRange, Tracker, read_samples


def open_tracker(run: RunContext, steps: StepRange) -> TensorBoardTracker | None:
    """A tracker that writes to ``tensorboard_dir``; None without one."""
    folder = run.config.logging.tensorboard_dir
    return TensorBoardTracker(folder, steps.first) if folder else None


class TensorBoardTracker(Tracker):
    """Every number of a step as a TensorBoard scalar; alerts and samples as text. Only rank 0 may create one."""

    def __init__(self, folder: str, resume_step: int = 0) -> None:
        """Events after ``resume_step`` in the folder are hidden. Raises ConfigError without the tensorboard package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir={folder!r} needs a package that is not installed: pip install tensorboard "
                "(extra [tensorboard])"
            ) from error
        self._writer, self._step = SummaryWriter(folder, purge_step=resume_step + 1), resume_step

    def log(self, metrics: StepMetrics) -> None:
        self._step = metrics.step
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def alert(self, alert: Alert) -> None:
        self._writer.add_text(f"alerts/{alert.kind}", alert.text, alert.step)

    def add_files(self, run_dir: Path) -> None:
        if (table := read_samples(run_dir)) is not None:
            lines = [table[0], ["---"] * len(table[0]), *table[1]]
            self._writer.add_text(SAMPLES, "\n".join(map(_row, lines)), self._step)

    def close(self) -> None:
        self._writer.close()


def _row(cells: list[object]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
