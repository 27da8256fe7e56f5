"""What a run writes about its steps: metrics.jsonl, expert_load.json and the trackers. Rank 0 alone writes."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron.optimus.checkpoint import store
from megatron.optimus.config.schema import RunConfig
from megatron.optimus.config.serialize import to_yaml
from megatron.optimus.context import RunContext
from megatron.optimus.platform.files import write_atomically
from megatron.optimus.platform.log import duration
from megatron.optimus.report.page import FILE_NAME as REPORT_NAME
from megatron.optimus.report.page import write_report_of_run
from megatron.optimus.training.alerts import NO_ALERTS, Alerts
from megatron.optimus.training.data import VALIDATION
from megatron.optimus.training.expert_load import ExpertLoad
from megatron.optimus.training.metrics import FILE_NAME as METRICS_NAME
from megatron.optimus.training.metrics import MetricsWriter, StepMetrics
from megatron.optimus.training.trackers import StepRange, Tracker, open_trackers

logger = logging.getLogger("optimus")


def _as_started_again(config: RunConfig) -> RunConfig:
    """Returns the configuration that a run's config.yaml gets, from which the run can be started again.

    ``--from-scratch`` and ``--allow-changed-data`` are left out: they are meant for a single start.
    """
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, from_scratch=False),
        data=dataclasses.replace(config.data, allow_changed_data=False),
    )


class MetricsLogger:
    """Writes the metrics of each step wherever the configuration asks for; does nothing on ranks other than 0."""

    def __init__(self, run: RunContext, steps: StepRange, alerts: Alerts = NO_ALERTS) -> None:
        """Raises, on rank 0 alone, OSError where nothing can be written, and ConfigError for a missing package."""
        self._alerts, self._topk = alerts, run.config.model.moe_router_topk
        self._is_writer = run.mesh.rank == 0
        self._has_failed = False
        self.last_losses: dict[str, str] = {}  # by what they are, as the closing line of the run shows them
        if not self._is_writer:
            return
        run_dir = Path(run.config.logging.run_dir)
        self._run_dir = run_dir
        self._trackers: list[Tracker] = open_trackers(run, steps)
        for tracker in self._trackers:
            alerts.add_sink(tracker.alert)
        self._parallel, self._last_step = run.config.parallel, steps.last
        self._open(steps.first)
        write_atomically(run_dir / "config.yaml", to_yaml(_as_started_again(run.config)), sync=False)

    def log(self, metrics: StepMetrics, valid_losses: Mapping[str, float]) -> None:
        """Writes one step.

        Args:
            metrics: of the step, without validation losses.
            valid_losses: in nats, by the name of the validation set; VALIDATION is the share of ``split``. With any,
                and at the end of the run, the load of every expert is written too.
        """
        if not self._is_writer:
            return
        named = {name: loss for name, loss in valid_losses.items() if name != VALIDATION}
        metrics = dataclasses.replace(metrics, valid_loss=valid_losses.get(VALIDATION), valid_losses=named)
        self.last_losses["loss"] = f"{metrics.loss:.4f}"
        for name, loss in valid_losses.items():
            key = "validation loss" if name == VALIDATION else f"validation loss of {name}"
            self.last_losses[key] = f"{loss:.4f} at step {metrics.step}"
        self._try(lambda: self._metrics.write(metrics))
        for tracker in self._trackers:
            self._try(partial(tracker.log, metrics))
        self._alerts.step_done(metrics.step, metrics.expert_load_LE or [], self._topk)
        self._try(partial(self._expert_load.add, metrics.step, metrics.expert_load_LE or []))
        if valid_losses:
            self._try(self._expert_load.write)

    def rewind(self, step: int) -> None:
        """Removes the lines of steps after ``step``, which the run will do again. Trackers keep theirs."""
        if not self._is_writer:
            return
        self._try(self._metrics.close)
        self._try(self._expert_load.close)
        self._try(partial(self._open, step))

    def _open(self, step: int) -> None:
        self._metrics = MetricsWriter(self._run_dir, resume_step=step)
        self._expert_load = ExpertLoad(self._run_dir, self._parallel, step, self._last_step)

    def _try(self, write: Callable[[], None]) -> None:
        """Logs the first error of any kind and goes on. A full disk, a closed terminal or a tracker's service that is
        out of reach must not end the run: rank 0 alone knows of it, and all other ranks would wait."""
        try:
            write()
        except Exception as error:
            if not self._has_failed:
                reason = str(error) or type(error).__name__
                logger.error("outputs of the run cannot be written (%s); training goes on without them", reason)
            self._has_failed = True

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_writer:
            return
        self._try(self._expert_load.close)
        self._try(self._metrics.close)
        self._alerts.close()
        if kind is None:  # after an error the launcher stops rank 0 soon: its message comes first
            write_report(self._run_dir)
        for tracker in self._trackers:  # last: they take files of the run that has ended, its report too
            self._try(lambda own=tracker: own.add_files(self._run_dir))  # type: ignore[misc]
            self._try(tracker.close)


def write_report(run_dir: Path) -> None:
    """Writes the page of the run into its folder. On rank 0 alone; an error is a warning."""
    try:
        if write_report_of_run(run_dir) is None:
            logger.info("%s is large: optimus report %s makes the run's page", run_dir / METRICS_NAME, run_dir)
    except Exception as error:  # whatever it is, the run has ended well
        logger.warning("%s was not written: %s", run_dir / REPORT_NAME, str(error) or type(error).__name__)


def startup_line(seconds: Mapping[str, float]) -> str:
    """Returns the start of a run in one line; phases below a twentieth of a second are left out."""
    phases = [f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items() if s >= 0.05 and name != "total"]
    return f"first step done {seconds['total']:.1f} s after the start of the process: {', '.join(phases)}"


def closing_lines(
    config: RunConfig, trained: tuple[int, int], last: int, losses: Mapping[str, str], seconds: float
) -> list[str]:
    """Returns what a process says when it has trained: steps, time, losses, the checkpoint and what to do with it.

    Args:
        config: the run.
        trained: first and last step of this process.
        last: the run's last step.
        losses: the last ones, by what they are.
        seconds: that training took, with validation and saves.
    """
    found = ", ".join(f"{name} {loss}" for name, loss in losses.items())
    lines = [
        f"trained steps {trained[0]} to {trained[1]} of {last} in {duration(seconds)}: {found}",
        f"checkpoint: {store.latest(config.checkpoint_folder)}",
    ]
    if (report := Path(config.logging.run_dir) / REPORT_NAME).exists():
        lines.append(f"report: {report}")
    if trained[1] < last:
        return [*lines, "the same command continues from it"]
    return [*lines, f"export to Hugging Face format: {_export(config)}"]


def nothing_left_lines(config: RunConfig, step: int, last: int) -> list[str]:
    """Returns what a process says whose run is at its end already, and how to go on."""
    unit = "iters" if config.training.train_samples is None else "samples"
    return [
        f"nothing left to train: step {step} of {last}",
        f"a larger --train-{unit} continues this run, another --run-dir starts a new one",
        f"export to Hugging Face format: {_export(config)}",
    ]


def _export(config: RunConfig) -> str:
    program = "optimus" if shutil.which("optimus") else "python -m megatron.optimus"  # a tree that is not installed
    source, destination = config.checkpoint_folder, Path(config.logging.run_dir) / "hf"
    return f"{program} convert {shlex.join([str(source), str(destination)])} --to hf"
