"""The progress of a run on standard output: one live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.optimus.context import RunContext
from megatron.optimus.platform.log import duration
from megatron.optimus.training.metrics import StepMetrics, flat
from megatron.optimus.training.trackers import StepRange, Tracker

if TYPE_CHECKING:
    from rich.progress import Progress as LiveBar

_BAR_WIDTH, _LEAST_BAR_WIDTH = 24, 8
_DECAY = 0.9  # a step's weight in the mean time of a token, behind the ETA, falls by this factor a step


def open_tracker(run: RunContext, steps: StepRange) -> ProgressLine:
    """The progress of every run."""
    interval = run.config.logging.log_interval
    return ProgressLine(steps.last, steps.total_tokens, steps.first, interval, run.mesh.layout.world_size)


@dataclass
class _Pace:
    """Tokens of steps, and the seconds that they took."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds


class ProgressLine(Tracker):
    """Shows steps as they end. ``close`` it, also after an error, to free the terminal."""

    in_background = False  # its lines stand among those of the log

    def __init__(
        self, total_steps: int, total_tokens: int, first_step: int = 0, log_interval: int = 1, num_devices: int = 1
    ) -> None:
        """``total_tokens``: those that the last step will have consumed. ``first_step``: steps done before this
        process; ``num_devices`` turns tokens/s per device into tokens/s."""
        self.total_steps, self.total_tokens = total_steps, total_tokens
        self.log_interval = log_interval
        self.num_devices = num_devices
        self._since_line = _Pace()
        self._recent = _Pace()  # tokens count, not steps: while the batch grows, later steps take longer
        self._steps_s = self._pauses_s = 0.0
        self._num_steps = 0
        self._valid = ""  # the last validation losses
        self._bar: LiveBar | None = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            self._bar = _live_bar()
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, words=[])
            self._bar.start()

    def log(self, metrics: StepMetrics) -> None:
        """Shows one step."""
        tokens = metrics.tokens_per_second_per_device * metrics.step_time_s * self.num_devices
        self._since_line.add(tokens, metrics.step_time_s)
        tokens_per_second = self._since_line.tokens / self._since_line.seconds
        eta = duration(self._seconds_left(metrics, tokens))
        valid = "".join(f" {key}={value:.4f}" for key, value in flat(metrics).items() if _is_validation(key, value))
        if valid or metrics.step % self.log_interval == 0 or metrics.step == self.total_steps:
            sys.stdout.write(
                f"step={metrics.step} loss={metrics.loss:.4f}{valid} lr={metrics.lr:.3e} "
                f"grad_norm={metrics.grad_norm:.3f} tokens/s={tokens_per_second:.0f} eta={eta}\n"
            )
            sys.stdout.flush()
            self._since_line = _Pace()
        if self._bar is not None:
            self._valid = valid.strip().replace("=", " ") or self._valid
            words = [f"ETA {eta}", f"loss {metrics.loss:.4f}", self._valid, f"{tokens_per_second:,.0f} tokens/s"]
            self._bar.update(self._task, completed=metrics.step, words=words)

    def _seconds_left(self, metrics: StepMetrics, tokens: float) -> float:
        """Time left of the run: steps at the pace of the last ones, and pauses in proportion as so far."""
        self._num_steps += 1
        if self._num_steps == 2:  # the first step includes warming up, and counts only while it is the only one
            self._recent, self._steps_s, self._pauses_s = _Pace(), 0.0, 0.0
        self._recent = _Pace(_DECAY * self._recent.tokens, _DECAY * self._recent.seconds)
        self._recent.add(tokens, metrics.step_time_s)
        self._steps_s += metrics.step_time_s
        self._pauses_s += metrics.pause_s or 0.0
        left = self.total_tokens - metrics.consumed_tokens
        return left * self._recent.seconds / self._recent.tokens * (1 + self._pauses_s / self._steps_s)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _is_validation(key: str, value: object) -> bool:
    return key.startswith("valid_loss") and value is not None


def _live_bar() -> LiveBar:
    from rich.progress import Progress as LiveBar
    from rich.progress import ProgressColumn, Task
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    class Words(ProgressColumn):
        """The step, a bar, and as many of the task's words as the terminal has room for, the first ones first."""

        def render(self, task: Task) -> Table:
            count = f"step {task.completed:.0f}/{task.total:.0f}"
            room = bar.console.width - len(count) - 1
            words: list[str] = []
            for word in filter(None, task.fields["words"]):
                if len(word) + 2 > room:
                    break
                words.append(word)
                room -= len(word) + 2
            row = Table.grid(padding=(0, 1))
            size = min(_BAR_WIDTH, room - 1)
            cells = [ProgressBar(task.total, task.completed, width=size)] if size >= _LEAST_BAR_WIDTH else []
            row.add_row(count, *cells, "  ".join(words))
            return row

    # Live redirects sys.stdout, so log lines appear above the bar instead of through it.
    bar = LiveBar(Words())
    return bar
