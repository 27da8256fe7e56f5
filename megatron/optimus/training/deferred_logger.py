"""Steps that are queued on the device but not read: the host learns what one did while the device is at the next.

Waiting for the numbers of a step before queueing the next leaves the device idle meanwhile. So a step is read, told of
and judged when the next one has been queued; at once where something hangs on it (a validation, a checkpoint, the end)
and on the CPU, which queues nothing. A run that has to stop for its health thereby takes at most one step more, and no
checkpoint: what a checkpoint holds has been judged before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from megatron.optimus.training.health import Health, TrainingError
from megatron.optimus.training.logging import Reporter
from megatron.optimus.training.metrics import StepMetrics
from megatron.optimus.training.step import PendingReport, StepReport


@dataclass(frozen=True)
class QueuedStep:
    """``line``: its metrics, from what it did, once the device has taken it. ``validate``: gives the losses of the
    validation that is due after it, by the name of the set."""

    number: int
    report: PendingReport
    line: Callable[[StepReport], StepMetrics]
    validate: Callable[[], dict[str, float]] | None = None


class Teller:
    """Reads steps in their order, writes their lines and judges them. Every rank must call the same in the same order:
    TrainingError is raised on all of them alike. A context: what is left is told of at its end."""

    def __init__(self, reporter: Reporter, health: Health, *, runs_behind: bool) -> None:
        self._reporter, self._health, self._runs_behind = reporter, health, runs_behind
        self._pending: QueuedStep | None = None
        self.stop_requested = False  # in a step told of so far; changes at the same step on every rank

    def add(self, step: QueuedStep) -> None:
        """Takes a step that has just been queued, and tells of the one before; of this one too if it cannot wait."""
        before, self._pending = self._pending, step
        if before is not None:
            self._tell(before)
        if step.validate is not None or not self._runs_behind:
            self.settle()

    def settle(self) -> None:
        """Tells of all that was added; waits for the device."""
        last, self._pending = self._pending, None
        if last is not None:
            self._tell(last)

    def _tell(self, step: QueuedStep) -> None:
        report = step.report.read()
        try:
            self._write(step, report)
        finally:  # without data for the validation the step counts still, for those that a resumed run compares with it
            self._health.observe(step.number, loss=report.loss, grad_norm=report.grad_norm, skipped=report.skipped)

    def _write(self, step: QueuedStep, report: StepReport) -> None:
        metrics = step.line(report)
        self.stop_requested = self.stop_requested or report.stop_requested
        valid_losses: dict[str, float] = {}
        try:
            if step.validate is not None:
                valid_losses = step.validate()
        finally:  # without data for the validation there is the step still
            self._reporter.write(metrics, report.expert_load_LE, valid_losses)

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever ends the run: a step that was taken has its line, except one beyond a stop for health."""
        if self._pending is None or isinstance(error, TrainingError):
            return
        try:
            self._write(self._pending, self._pending.report.read())
        except RuntimeError:
            if error is None:  # else that one says what has happened
                raise
