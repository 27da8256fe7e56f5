"""Everything a run tells: metrics.jsonl, expert loads, the progress line and trackers. Rank 0 alone writes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron.optimus.config.serialize import to_dict, to_yaml
from megatron.optimus.context import RunContext
from megatron.optimus.training.build import VALIDATION
from megatron.optimus.training.expert_load import ExpertLoad
from megatron.optimus.training.metrics import MetricsWriter, StepMetrics
from megatron.optimus.training.progress import Progress
from megatron.optimus.training.trackers import TensorBoardTracker, Tracker, WandbTracker

logger = logging.getLogger("optimus")


class Reporter:
    """On rank 0 a writer of every output that the configuration asks for; on other ranks nothing."""

    def __init__(self, run: RunContext, *, first_step: int, last_step: int, total_samples: int) -> None:
        """``first_step``: steps done before; ``total_samples``: those that the last step will have consumed.

        Raises OSError where nothing can be written, ConfigError for a missing package, a tracker's own errors; all on
        rank 0 alone.
        """
        config, mesh = run.config, run.mesh
        self._silent = mesh.rank != 0
        self._has_failed = False
        if self._silent:
            return
        run_dir, logging = Path(config.logging.run_dir), config.logging
        self._trackers: list[Tracker] = []
        if logging.tensorboard_dir:
            self._trackers.append(TensorBoardTracker(logging.tensorboard_dir, first_step))
        if logging.wandb_project:
            self._trackers.append(WandbTracker(logging.wandb_project, logging.wandb_exp_name, run_dir, to_dict(config)))
        self._metrics = MetricsWriter(run_dir, resume_step=first_step)
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        self._expert_load = ExpertLoad(run_dir, config.parallel)
        total_tokens = total_samples * config.training.seq_length
        self._progress = Progress(last_step, total_tokens, first_step, logging.log_interval, mesh.layout.world_size)

    def write(self, metrics: StepMetrics, expert_load_LE: list[list[int]], valid_losses: Mapping[str, float]) -> None:
        """Takes one step. With validation losses (by the set's name; VALIDATION is the share of ``split``), and at the
        end, the load of every expert is written too."""
        if self._silent:
            return
        named = {name: loss for name, loss in valid_losses.items() if name != VALIDATION}
        metrics = dataclasses.replace(metrics, valid_loss=valid_losses.get(VALIDATION), valid_losses=named)
        self._try(partial(self._progress.update, metrics))
        self._try(lambda: self._metrics.write(metrics))
        for tracker in self._trackers:
            self._try(partial(tracker.write, metrics))
        self._expert_load.add(metrics.step, expert_load_LE)
        if valid_losses:
            self._try(self._expert_load.write)

    def _try(self, write: Callable[[], None]) -> None:
        """A full disk, a terminal that is gone or a tracker's service out of reach cost lines of a report, not the run:
        rank 0 alone knows of it, and all others would wait."""
        try:
            write()
        except Exception as error:  # of any kind: a tracker has its own
            if not self._has_failed:
                reason = str(error) or type(error).__name__
                logger.error("outputs of the run cannot be written (%s); training goes on without them", reason)
            self._has_failed = True

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._silent:
            return
        self._try(self._progress.close)
        self._try(self._expert_load.write)
        self._try(self._metrics.close)
        for tracker in self._trackers:
            self._try(tracker.close)
