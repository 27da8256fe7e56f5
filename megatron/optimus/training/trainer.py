"""The training loop: batch, forward and backward, optimizer, metrics, log, evaluate, save.

``Trainer._train`` is the loop, ``train_step`` one optimizer step. The device runs behind the host: if the host waited
for a step's numbers before it queued the next step, the device would be idle. So a step is logged, and its loss and
gradient norm are checked (health.py), after the next step has been queued. It is logged at once where an evaluation, a
checkpoint or the end of the run needs its numbers, and on the CPU, which queues nothing. A run that stops because it is
unhealthy trains at most one step too many, and never saves a step that has not been checked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron.optimus.checkpoint.values import WARNINGS_FIELD
from megatron.optimus.config.choices import OnLossSpike, OnNan
from megatron.optimus.config.costs import flops_per_token
from megatron.optimus.config.duration import batch_sizes, last_step, last_step_of_process
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.fingerprint import LINES_FIELD
from megatron.optimus.data.loader import Batch
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.ops import fp8
from megatron.optimus.platform import device as devices
from megatron.optimus.platform import heartbeat
from megatron.optimus.platform.intervals import is_multiple
from megatron.optimus.platform.memory import needs_memory
from megatron.optimus.platform.metrics import PendingTotals, Recorder
from megatron.optimus.platform.signals import StopRequest
from megatron.optimus.training.alerts import NO_ALERTS, ROLLBACK, SLOW_RANK, alerts_of
from megatron.optimus.training.checkpointing import Checkpoints, has_own_checkpoint
from megatron.optimus.training.curvature import estimate_curvature, is_due
from megatron.optimus.training.data import build_data, check_unchanged, labels_per_micro_batch, num_labels
from megatron.optimus.training.drill import DrillFaults
from megatron.optimus.training.engine import (
    Engine,
    build_engine,
    build_model,
    step_outcome,
    training_state,
    update_average,
)
from megatron.optimus.training.evaluate import SetLoss, bytes_of_tokens, evaluate_sets, loss_over
from megatron.optimus.training.health import (
    MAX_SKIPPED_BY_POLICY,
    MAX_SKIPPED_IN_A_ROW,
    Health,
    IntegrityError,
    NumericError,
    TrainingError,
    check_devices,
)
from megatron.optimus.training.integrity import Integrity
from megatron.optimus.training.logging import (
    MetricsLogger,
    closing_lines,
    nothing_left_lines,
    startup_line,
    write_report,
)
from megatron.optimus.training.lr_schedule import RateSchedule
from megatron.optimus.training.metrics import StepMetrics
from megatron.optimus.training.noise_scale import GradientNoiseScale
from megatron.optimus.training.nonfinite import NonFiniteSource
from megatron.optimus.training.pipeline_schedule import Schedule, build_schedule
from megatron.optimus.training.profiling import StepProfiler
from megatron.optimus.training.qk_clip import QKClip
from megatron.optimus.training.rollback import RollbackRequested, Rollbacks
from megatron.optimus.training.stragglers import STEPS, StepSampler
from megatron.optimus.training.timing import StepClock, StepTime, mfu
from megatron.optimus.training.trackers import StepRange

logger = logging.getLogger("optimus")

# Phases of a step in profiles (profiling.py lists what begins with "part: ").
FORWARD_BACKWARD, OPTIMIZER_STEP = "part: forward and backward", "part: optimizer step"


@dataclass(frozen=True)
class StepResult:
    """What one step did, over the global batch."""

    metrics: dict[str, float]  # everything recorded, by name; "loss" is the cross-entropy per label in nats
    grad_norm: float  # before clipping
    skipped: bool  # the update was left out: the gradient norm was not finite or far too large
    expert_load_LE: list[list[int]]  # slots per expert, of the layers that have experts
    stop_requested: bool  # a rank was asked to end the run; the same on all
    gradient_noise: list[float] = dataclasses.field(default_factory=list)  # as ``engine.step_outcome`` has it


class PendingResult:
    """The result of a step that the device may not have done yet."""

    def __init__(self, totals: PendingTotals, outcome: Tensor, num_experts: int) -> None:
        self._totals, self._outcome, self._num_experts = totals, devices.AsyncHostCopy(outcome), num_experts

    def read(self) -> StepResult:
        """Waits until the device has done the step, not for what was queued later."""
        [outcome], totals = self._outcome.read(), self._totals.read()
        grad_norm, skipped, *noise = outcome.tolist()
        load_LE = totals.tensor.long().view(-1, self._num_experts).tolist() if self._num_experts else []
        [stop] = totals.host_values
        return StepResult(totals.metrics, grad_norm, bool(skipped), load_LE, stop > 0, noise)


@needs_memory("a training step")
def train_step(
    run: RunContext,
    engine: Engine,
    schedule: Schedule,
    recorder: Recorder,
    batches: Sequence[Batch],
    before_update: Callable[[], None] = lambda: None,
    stop_requested: Callable[[], bool] = lambda: False,
    after_backward: Callable[[Sequence[Tensor]], None] = lambda losses: None,
    after_update: Callable[[], None] = lambda: None,
) -> PendingResult:
    """Queues one optimizer step; nothing here waits for the device. Collective.

    The gradient is that of the mean over all labels of the global batch: each micro-batch's sum of losses is divided by
    the labels that a micro-batch has on average over all ranks, the engine divides by the number of micro-batches, and
    the optimizer averages over data-parallel ranks.

    Args:
        run: configuration, mesh and device of the run.
        engine: the model and its optimizer, with this step's learning rate and largest gradient norm set.
        schedule: runs forward and backward of the micro-batches.
        recorder: collects what ``platform.metrics.record`` is called with in the step.
        batches: this rank's micro-batches, on the device.
        before_update: called before anything changes that a checkpoint holds.
        stop_requested: whether this rank was asked to end the run; called while the device works.
        after_backward: called with the losses of this rank's micro-batches when the passes are queued.
        after_update: called when the update is queued.

    Returns:
        The step's result; its ``read`` waits for the device.
    """
    heartbeat.beat("forward and backward")
    quantized_once = fp8.constant_weights() if len(batches) > 1 else nullcontext()
    with record_function(FORWARD_BACKWARD), recorder.recording(), quantized_once:
        losses = schedule.forward_backward(batches, labels_per_micro_batch(batches, run.mesh))
    after_backward(losses)
    before_update()
    heartbeat.beat("optimizer step")
    with record_function(OPTIMIZER_STEP):
        engine.step()
    after_update()

    # One all-reduce for the metrics of all layers and micro-batches, the load of every expert, and requests to stop.
    for loss_sum, batch in zip(losses, batches, strict=False):  # none where another pipeline stage has the loss
        recorder.add("loss", loss_sum, "mean", num_labels(batch))
    load_LE = _expert_load(run, schedule)
    stop = float(stop_requested())
    heartbeat.beat("sums over all ranks")
    totals = recorder.reduce([stop], load_LE)
    outcome = step_outcome(engine)
    if load_LE is not None:
        global_load_LE = totals.tensor.long().view_as(load_LE)
        rate = torch.where(outcome[1] == 0, run.config.model.moe_router_bias_update_rate, 0.0).to(load_LE.device)
        for number, router in schedule.routers.items():
            router.finish_step(global_load_LE[run.config.model.moe_layers.index(number)], rate)
    return PendingResult(totals, outcome, run.config.model.num_experts if load_LE is not None else 0)


def _expert_load(run: RunContext, schedule: Schedule) -> Tensor | None:
    """Slots that this rank's tokens sent to each expert in this step; zeros for layers of other pipeline stages."""
    layers, routers = run.config.model.moe_layers, schedule.routers
    if not layers:
        return None
    none_E = torch.zeros(run.config.model.num_experts, dtype=torch.int64, device=run.device)
    return torch.stack([routers[number].step_counts_E if number in routers else none_E for number in layers])


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device may not have done yet, and what the host knew when it was queued."""

    step: int
    result: PendingResult
    time: StepTime
    lr: float
    samples: int
    consumed_samples: int
    peak_memory: int  # bytes
    checkpoint_times: dict[str, float | None]


class Tasks(Protocol):
    """What evaluates the model on tasks. Given to the trainer, as training knows nothing of inference."""

    def evaluate(self, model: Decoder, step: int, metadata: Mapping[str, Any]) -> dict[str, float]:
        """Scores by NAME/METRIC; the model is as before afterwards. ``metadata``: that of the run's checkpoints."""


class Trainer:
    """One run on this rank. Building it and every method are collective over all ranks."""

    tasks: Tasks | None = None
    alerts = NO_ALERTS
    bytes_V: Tensor | None = None  # of text of each token, for bits per byte
    qk_clip: QKClip | None = None

    def __init__(self, run: RunContext, tasks: Tasks | None = None) -> None:
        config = run.config
        self.run, self.config, self.tasks = run, config, tasks
        startup = run.startup
        with startup.phase("data", "opening the token files"):
            self.data = build_data(run)
        with startup.phase("model", "building the model"):
            is_drawn = not has_own_checkpoint(run)
            self.model = build_model(run, draws=is_drawn)
        with startup.phase("optimizer", "building the optimizer and its states"):
            self.engine = build_engine(run, self.model)
            self.schedule = build_schedule(run, self.engine)
            self.qk_clip = QKClip(run, self.model, self.engine) if config.optimizer.qk_clip_threshold else None
        with startup.phase("checkpoint", "looking for a checkpoint and loading it"):
            self.checkpoints = Checkpoints(run, self.model, self.engine, is_drawn=is_drawn)
            # Optimizer steps done, and the position in the order of samples, which is the whole state of the data.
            self.step, self.consumed_samples = self.checkpoints.resume()
        comparing = startup.phase("data", "comparing the token files with those of the checkpoint")
        if self.data.valid:
            self.bytes_V = bytes_of_tokens(run)
        with comparing, run.ranks.failing_alike():
            check_unchanged(run, self.data, self.checkpoints.data_files_before)
        self.first_step = self.step
        self.last_step = last_step(config.training, self.step, self.consumed_samples)
        self.batch_sizes = batch_sizes(config.training)
        self.rates = RateSchedule(config.optimizer, config.training, self.checkpoints.batch_factor)
        self.alerts, is_first = alerts_of(run), run.mesh.rank == 0
        self.checkpoints.alerts = self.alerts
        skips_on = config.training.on_nan is OnNan.SKIP
        self.health = Health(
            config.optimizer.grad_norm_spike_sigma,
            max_skipped=MAX_SKIPPED_BY_POLICY if skips_on else MAX_SKIPPED_IN_A_ROW,
            speaks=is_first,
            alerts=self.alerts,
        )
        self.rollbacks = Rollbacks(config.training)
        self.health.restore(self.checkpoints.extra_state)
        self.noise_scale = GradientNoiseScale()
        self.noise_scale.restore(self.checkpoints.extra_state)
        self.rollbacks.restore(self.checkpoints.extra_state, self.step)
        self.nonfinite = NonFiniteSource(self.model, run.ranks, self.data.train.describe)
        self.drill = DrillFaults(run.mesh.rank, self.model, self.engine)
        self.integrity = Integrity(run, self.engine, self.schedule, self.data.train, self.step)
        self.recorder, self.clock = Recorder(run.ranks), StepClock(run.device)
        self.sampler: StepSampler | None = None  # while steps are compared over the ranks
        self.is_async_device = devices.is_asynchronous(run.device)
        self.queued: QueuedStep | None = None  # the last step, until it is logged
        self.stop_requested = False  # of any rank, in a step that has been logged
        self.logged_batch_size = 0  # of a batch-size ramp

    def fit(self) -> int:
        """Trains up to ``train_iters`` steps or ``train_samples`` samples, up to a multiple of ``exit_interval``, or
        until a signal asks to stop. A run that is at its end, this one or an earlier start of it, has its test sets
        evaluated.

        Returns the exit code: 0, or that of the signal as shells report it. Everything up to the last step is saved.
        """
        if self.step >= self.last_step:
            for line in nothing_left_lines(self.config, self.step, self.last_step):
                logger.info("%s", line)
            return self._evaluate_test_sets()
        began = time.monotonic()
        options = self.config.logging
        profiler = StepProfiler(
            options, self.engine.module, self.run.device, self.clock, rank=self.run.mesh.rank, first_step=self.step
        )
        with self._open_logger() as metrics_logger, StopRequest() as stop, profiler:
            with self.run.startup.phase("data", "reading the first batches"):
                self._start_data()
            try:
                while True:
                    try:
                        self._train(metrics_logger, stop, profiler)
                        break
                    except RollbackRequested as wanted:
                        self._roll_back(wanted, metrics_logger)
            except IntegrityError as error:
                self.checkpoints.discard_after(error.last_good_step)  # the run begins again from before it
                raise
            except TrainingError:
                self.checkpoints.forget_memory()
                self.checkpoints.finish()  # those in flight hold steps from before the trouble
                raise
            except BaseException:
                self._log_queued_step(metrics_logger)
                raise
            finally:
                if self.sampler is not None:
                    self.sampler.stop()
                self._log_warnings()
        heartbeat.beat("the end of the run")
        trained, seconds = (self.first_step + 1, self.step), time.monotonic() - began
        is_stopped = self.stop_requested and self.step < self.last_step
        code = 128 + (stop.signal or signal.SIGTERM) if is_stopped else self._evaluate_test_sets()
        if self.run.mesh.rank == 0:  # last: the others wait for nothing that reading the folder may hold up
            for line in closing_lines(self.config, trained, self.last_step, metrics_logger.last_losses, seconds):
                logger.info("%s", line)
        return code

    def _evaluate_test_sets(self) -> int:
        """Evaluates the test sets of a run that is at its end; returns the exit code 0."""
        if self.data.test and self.step >= self.last_step:
            evaluate_sets(self.run, self.data.test, self.step, self.schedule)
            if self.run.mesh.rank == 0:
                write_report(Path(self.config.logging.run_dir))  # with these losses
        return 0

    def _start_data(self) -> None:
        """Begins to read the batches of the steps to come."""
        skipped = self._starts_of_skipped_steps()
        start = partial(self.data.train.start, self.consumed_samples, self.last_step - self.step, skipped)
        self.run.ranks.run_on_all_ranks(start, "reading the first batches", DataError)
        self.clock.restart()

    def _roll_back(self, wanted: RollbackRequested, metrics_logger: MetricsLogger) -> None:
        """Goes back to a checkpoint from before the bad steps, and saves it again with the steps to skip.

        Raises NumericError on every rank where there is none.
        """
        heartbeat.beat("rolling back")
        at_step, self.queued = self.step, None
        position = self.checkpoints.roll_back(self.rollbacks.limits(wanted))
        if position is None:
            text = f"{wanted.reason}; there is no checkpoint from before step {wanted.first} to go back to"
            with self.run.ranks.failing_alike():
                raise NumericError(f"{text}: save earlier with --save-interval, or keep more with --save-retain")
        self.step, self.consumed_samples = position
        self.integrity.forget()
        for part in (self.health, self.noise_scale):
            part.restore(self.checkpoints.extra_state)
        self.rollbacks.restore(self.checkpoints.extra_state, self.step)
        one = self.rollbacks.add(wanted, at_step, self.step)
        text = f"{wanted.reason}: back to step {self.step}, and past steps {one.first_skipped} to {one.last_skipped}"
        if self.run.mesh.rank == 0:
            logger.warning("step %d: %s", at_step, text)
        self.alerts.send(ROLLBACK, at_step, text, is_logged=True)
        self.checkpoints.extra_state |= self.rollbacks.to_json()
        self.checkpoints.save_again(self.step, self.consumed_samples)
        metrics_logger.rewind(self.step)
        self._start_data()

    def _train(self, metrics_logger: MetricsLogger, stop: StopRequest, profiler: StepProfiler) -> None:
        """Trains, logs, evaluates and saves until the last step, an ``exit_interval``, or any rank's request to stop.

        Raises, on every rank, TrainingError where the run is unhealthy, RollbackRequested where it is to go back,
        DataError where data cannot be read, and CheckpointError where a save failed.
        """
        training = self.config.training
        while self._skip_steps() < self.last_step:
            heartbeat.beat("reading the batches", self.step + 1)
            self.drill.begin_step()
            self._check_devices()
            profiler.before(self.step + 1)
            batches = self._next_batches()
            lr = self._set_rates()
            if is_due(self.config, self.step):
                estimate_curvature(
                    *(self.run, self.engine, self.schedule, batches, self.step), self.checkpoints.before_update
                )
                self.integrity.forget()
            with self.run.ranks.failing_alike():
                self.integrity.check_gradients(self.step + 1, self.consumed_samples, batches)
            if self.qk_clip is not None:
                self.qk_clip.begin_step(self.step)
            self.nonfinite.begin_step()
            result = train_step(
                *(self.run, self.engine, self.schedule, self.recorder, batches),
                before_update=self._before_update,
                after_update=partial(self.integrity.after_update, self.step + 1),
                stop_requested=partial(self._is_asked_to_stop, stop),  # a rank that cannot go on must not leave alone
                after_backward=partial(self.nonfinite.end_step, self.consumed_samples),
            )
            queued = self._count_step(result, lr)
            update_average(self.engine, self.config.optimizer, self.step)
            profiler.after(self.step)

            # Log the step before this one while the device is at this one; log this one too where something needs it.
            if self.queued is not None:
                self._finish_step(self.queued, metrics_logger)
            self.queued = queued
            evaluates = is_multiple(self.step, training.eval_interval)
            evaluates = evaluates or (training.eval_interval > 0 and self.step == self.last_step)
            is_exiting = (
                self.stop_requested or self.step == self.last_step or is_multiple(self.step, training.exit_interval)
            )
            asks = self._tasks_are_due()
            if evaluates or asks or is_exiting or self.checkpoints.is_due(self.step) or not self.is_async_device:
                self._finish_step(queued, metrics_logger, evaluates=evaluates, asks=asks)

            is_exiting = is_exiting or self.stop_requested
            if self.stop_requested:
                self._log_stop(stop)
            self._save(is_exiting=is_exiting)
            if is_exiting:
                break
        # A signal to one rank, or data that one rank cannot read, ends all ranks after the same step.
        if self.stop_requested and self.step < self.last_step:
            self.run.ranks.run_on_all_ranks(self.data.train.check, f"reading beyond step {self.step}", DataError)

    def _next_batches(self) -> list[Batch]:
        """This rank's micro-batches of the next step, on the device."""
        size = self.batch_sizes.at(self.consumed_samples)
        if self.batch_sizes.ramp and size != self.logged_batch_size:
            logger.info("global batches of %d samples from step %d on", size, self.step + 1)
            self.logged_batch_size = size
        with self.clock.data():
            batches = self.data.train.batch(self.consumed_samples)
        return [batch.to(self.run.device) for batch in batches]

    def _before_update(self) -> None:
        if self.qk_clip is not None:
            self.qk_clip.before_update(self.recorder)
        self.checkpoints.before_update()
        self.integrity.before_update(self.step + 1, self.recorder)

    def _set_rates(self) -> float:
        """Sets learning rate (returned) and largest gradient norms of the next step."""
        optimizer, step = self.engine.optimizer, self.step
        lr = self.rates.learning_rate(step, self.consumed_samples)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # of muP and CompleteP
        # Not the optimizer's own count of steps: after a restart from weights alone that is smaller than the run's.
        optimizer.clip_grad = self.rates.largest_grad_norm(step, self.consumed_samples)
        optimizer.skip_above = self.health.largest_norm(step + 1)
        return lr

    def _is_asked_to_stop(self, stop: StopRequest) -> bool:
        """Whether this rank got a signal, or cannot read the batches to come. Waits for those that are read ahead."""
        heartbeat.beat("reading ahead")
        with self.clock.data():
            failure = self.data.train.failure()
        return failure is not None or stop.signal is not None

    def _count_step(self, result: PendingResult, lr: float) -> QueuedStep:
        """Counts the step that has just been queued."""
        samples, time = self.batch_sizes.at(self.consumed_samples), self.clock.end_step()
        self.step += 1
        self.consumed_samples += samples
        return QueuedStep(
            *(self.step, result, time, lr, samples, self.consumed_samples),
            peak_memory=devices.peak_memory(self.run.device),
            checkpoint_times=self.checkpoints.take_times(),
        )

    def _finish_step(
        self, queued: QueuedStep, metrics_logger: MetricsLogger, *, evaluates: bool = False, asks: bool = False
    ) -> None:
        """Waits until the device has done the step, evaluates and asks tasks if that is due, logs and judges the step.

        Raises TrainingError on every rank where the run is unhealthy. Raises DataError where validation data cannot be
        read, after the step has been saved.
        """
        heartbeat.beat("waiting for the device")
        result = queued.result.read()
        self.stop_requested = self.stop_requested or result.stop_requested
        valid_losses: dict[str, float] = {}
        bits: dict[str, float] = {}
        scores: dict[str, float] | None = None
        unreadable: DataError | None = None
        try:
            if evaluates:
                found = self._evaluate()
                valid_losses = {name: one.loss for name, one in found.items()}
                bits = {name: one.bits_per_byte for name, one in found.items() if one.bits_per_byte is not None}
            if asks and self.tasks is not None:
                with self.clock.pause(), training_state(self.engine).averaged_parameters():
                    scores = self.tasks.evaluate(self.model, self.step, self.checkpoints.extra_state) or None
        except DataError as error:
            unreadable = error
        metrics = dataclasses.replace(self._metrics(queued, result), task_scores=scores, bits_per_byte=bits or None)
        if self.run.startup.is_running:
            metrics = dataclasses.replace(metrics, startup_s=self.run.startup.finish("first_step"))
        heartbeat.beat("logging")
        metrics_logger.log(metrics, valid_losses)
        if metrics.startup_s is not None:
            logger.info("%s", startup_line(metrics.startup_s))
            # Now, not before the first step, which shows sooner that the run works.
            with self.clock.pause(recurs=False):
                self.checkpoints.prepare()
        self.queued = None
        others = {**result.metrics, **{f"valid_loss/{name}": value for name, value in valid_losses.items()}}
        loss = others.pop("loss", 0.0)
        with self.run.ranks.failing_alike():
            self.integrity.judge(queued.step, result.metrics)
            self.integrity.choose_intervals(queued.step, queued.time)
            self._judge(queued.step, loss, result, others)
        if unreadable is not None:
            logger.info("validation data cannot be read: saving step %d", self.step)
            self._save(is_exiting=True)
            raise unreadable

    def _judge(self, step: int, loss: float, result: StepResult, others: dict[str, float]) -> None:
        """Compares a step with those before it. Collective where the run is broken.

        Raises NumericError where it is, and RollbackRequested where the policies ask for that.
        """
        policy = self.config.training
        self.nonfinite.watch(is_skipped=not math.isfinite(result.grad_norm))
        try:
            self.health.observe(step, loss=loss, grad_norm=result.grad_norm, skipped=result.skipped, others=others)
        except NumericError as error:
            source, is_device = self.nonfinite.describe()
            if policy.on_nan is OnNan.ROLLBACK and not is_device and self.rollbacks.are_left:
                count = step - error.first_step + 1
                reason = f"{error}. {source}" if source else str(error)
                raise RollbackRequested(error.first_step, step, reason, {"skipped_in_a_row": count}) from None
            remedy = error.remedy if source else error.remedy.capitalize()
            raise NumericError(f"{error}. {source}{'; or ' if source else ''}{remedy}") from None
        spike = self.health.loss_spike
        if spike is not None and policy.on_loss_spike is OnLossSpike.ROLLBACK and self.rollbacks.are_left:
            evidence = {"loss": spike.value, "usual_loss": spike.usual, "spread": spike.spread}
            reason = f"loss {spike.value:.4g} far above the median {spike.usual:.4g} (deviation {spike.spread:.2g})"
            raise RollbackRequested(step, step, reason, evidence)

    def _evaluate(self) -> dict[str, SetLoss]:
        """The loss over every validation set, by its name."""
        heartbeat.beat("evaluation")
        with self.clock.pause():
            sets, bytes_V = self.data.valid.items(), self.bytes_V
            return {name: loss_over(self.run, loader, self.schedule, bytes_V) for name, loader in sets}

    def _tasks_are_due(self) -> bool:
        is_due = is_multiple(self.step, self.config.training.eval_tasks_interval) or self.step == self.last_step
        return self.tasks is not None and is_due

    def _save(self, *, is_exiting: bool) -> None:
        """Saves what is due after this step; everything, and waits for it, where the run ``is_exiting``."""
        is_due = self.checkpoints.is_due(self.step)
        if is_due and self.health.is_not_finite and not is_exiting:
            # A restart after NumericError would go on from here, and never do the updates that were left out.
            self.checkpoints.postpone(self.step)
            return
        if is_due or is_exiting:
            marks = self.health.marks(is_saved=is_exiting or self.checkpoints.full_is_due(self.step))
            state = self.checkpoints.extra_state
            state |= self.health.to_json() | self.noise_scale.to_json() | self.rollbacks.to_json()
            state |= {LINES_FIELD: self.data.fingerprints, WARNINGS_FIELD: marks}
            if not marks:
                del state[WARNINGS_FIELD]
            heartbeat.beat("saving a checkpoint")
        with self.clock.pause() if is_due else nullcontext():
            self.checkpoints.after_step(self.step, self.consumed_samples, is_exiting=is_exiting)

    def _metrics(self, queued: QueuedStep, result: StepResult) -> StepMetrics:
        """The numbers of a step, as they are logged."""
        training, model = self.config.training, self.config.model
        recorded, load_LE = dict(result.metrics), result.expert_load_LE
        recorded |= self.noise_scale.observe(result.gradient_noise, queued.samples, skipped=result.skipped)
        seconds = queued.time.seconds
        tokens = queued.samples * training.seq_length / self.run.mesh.layout.world_size
        flops = flops_per_token(model, training.seq_length)
        peak = self.config.logging.device_peak_tflops
        known = devices.peak_flops(devices.device_name(self.run.device), self.run.dtype)
        dropped = recorded.pop("dropped_tokens", None)
        return StepMetrics(
            step=queued.step,
            consumed_tokens=queued.consumed_samples * training.seq_length,
            global_batch_size=queued.samples,
            loss=recorded.pop("loss", 0.0),  # 0: no label of the batch counts
            aux_loss=recorded.pop("aux_loss", None),
            z_loss=recorded.pop("z_loss", None),
            grad_norm=result.grad_norm,
            lr=queued.lr,
            step_time_s=seconds,
            data_wait_s=queued.time.data_wait,
            tokens_per_second_per_device=tokens / seconds,
            tflops_per_device=tokens / seconds * flops / 1e12,
            mfu=mfu(tokens / seconds, flops, known if peak is None else peak * 1e12),
            expert_load_max_over_mean=max((max(load) * len(load) / sum(load) for load in load_LE), default=None),
            router_entropy=recorded.pop("router_entropy", None),
            dropped_tokens=None if dropped is None else round(dropped),
            peak_memory_gib=queued.peak_memory / 2**30 or None,
            skipped=result.skipped or None,
            pause_s=queued.time.pause or None,
            rollback=self.rollbacks.take_numbers(),
            **queued.checkpoint_times,  # type: ignore[arg-type]
            recorded=recorded,
            expert_load_LE=load_LE,
        )

    def _open_logger(self) -> MetricsLogger:
        last = last_step_of_process(self.config.training, self.step, self.last_step)
        samples = self.batch_sizes.after(self.consumed_samples, last - self.step)
        steps = StepRange(self.step, last, samples * self.config.training.seq_length)
        return self.run.ranks.run_on_all_ranks(
            lambda: MetricsLogger(self.run, steps, self.alerts), "opening the outputs", TrainingError
        )

    def _log_queued_step(self, metrics_logger: MetricsLogger) -> None:
        """Logs a step that is done when an error ends the run."""
        if self.queued is not None:
            try:
                metrics_logger.log(self._metrics(self.queued, self.queued.result.read()), {})
            except RuntimeError:
                logger.debug("the last step cannot be read", exc_info=True)  # the error that ends the run says why

    def _log_warnings(self) -> None:
        """Says once more, at the end, what was out of line in this run and its checkpoints."""
        lines = [*self.health.summary(), *self.checkpoints.warnings]
        if lines and self.run.mesh.rank == 0:
            logger.warning("look at this run before it is used: %s", "; ".join(lines))

    def _log_stop(self, stop: StopRequest) -> None:
        if stop.signal is not None:
            logger.info("asked to stop: saving step %d; a second signal ends the run at once", self.step)
        else:
            why = "data cannot be read" if self.data.train.failure() else "a rank lacks data or was asked to stop"
            logger.info("%s: saving step %d", why, self.step)

    def _starts_of_skipped_steps(self) -> set[int]:
        """Positions in the order of samples at which skipped steps begin; their data need not be readable."""
        numbers = self.rollbacks.skipped_steps(self.step + 1, self.last_step)
        return {self.batch_sizes.after(self.consumed_samples, n - 1 - self.step) for n in numbers}

    def _skip_steps(self) -> int:
        """Counts the steps that ``iterations_to_skip`` and rollbacks skip, without training them; returns the steps
        done. The last step of a run is never skipped."""
        while self.rollbacks.skipped_steps(self.step + 1, min(self.step + 2, self.last_step)):
            self.step += 1
            self.consumed_samples += self.batch_sizes.at(self.consumed_samples)
            logger.info("step %d is left out, as iterations_to_skip or a rollback says", self.step)
        return self.step

    def _check_devices(self) -> None:
        interval, done = self.config.logging.straggler_check_interval, self.step - self.first_step
        steps = min(STEPS, interval - 1)
        if self.sampler is not None and done % interval == steps:
            self.sampler.report(self.run.ranks, steps)
            self.sampler = None
        if is_multiple(done, interval):
            with self.clock.pause():
                slow = check_devices(self.run)
            if slow:
                names = ", ".join(f"rank {one.rank} on {one.host}" for one in slow[:8])
                self.alerts.send(SLOW_RANK, self.step, f"{len(slow)} slow: {names}")
            if done > 0 and steps > 0:  # the first steps are not usual: kernels are compiled, connections made
                self.sampler = StepSampler()

    def close(self) -> None:
        """Ends the data threads and releases the folder of checkpoints."""
        self.checkpoints.close()
        for loader in (self.data.train, *self.data.valid.values(), *self.data.test.values()):
            loader.close()
