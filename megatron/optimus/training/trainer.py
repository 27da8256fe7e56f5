"""The training loop: build everything in order, then step, report, validate and save until the last step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.optimus.config.duration import batch_sizes, last_step
from megatron.optimus.context import RunContext
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.loader import Batch
from megatron.optimus.platform import device as devices
from megatron.optimus.platform.stopping import StopRequest
from megatron.optimus.training.build import build_data, build_model
from megatron.optimus.training.checkpointing import Checkpoints
from megatron.optimus.training.deferred_logger import QueuedStep, Teller
from megatron.optimus.training.engine import build_engine
from megatron.optimus.training.evaluate import evaluate_sets, loss_over
from megatron.optimus.training.flops import flops_per_token, mfu
from megatron.optimus.training.health import Health, TrainingError
from megatron.optimus.training.logging import Reporter
from megatron.optimus.training.lr_schedule import RateSchedule
from megatron.optimus.training.metrics import StepMetrics
from megatron.optimus.training.pipeline_schedule import build_schedule
from megatron.optimus.training.profiling import StepProfiler
from megatron.optimus.training.step import PendingReport, StepReport, train_step
from megatron.optimus.training.stragglers import check_devices
from megatron.optimus.training.timing import StepClock, StepTime

logger = logging.getLogger("optimus")

_NORMS = "recent_grad_norms"  # in a checkpoint


class Trainer:
    """One run on this rank. Building it and every method are collective over all ranks."""

    def __init__(self, run: RunContext) -> None:
        config, device = run.config, run.device
        self.run, self.config, self.mesh, self.device, self.ranks = run, config, run.mesh, device, run.ranks
        self.runs_behind, self.clock = devices.runs_behind(device), StepClock(device)
        self.data = build_data(run)
        self.model = build_model(run)
        self.engine = build_engine(run, self.model)
        self.schedule = build_schedule(run, self.engine)
        self.checkpoints = Checkpoints(run, self.model, self.engine)
        # Optimizer steps done; position in the order of samples, which is the whole state of the data.
        self.step, self.consumed_samples = self.checkpoints.resume()
        self.first_step = self.step
        self.batch_sizes, self.rates = batch_sizes(config.training), RateSchedule(config.optimizer, config.training)
        self._told_size = 0  # of a batch-size ramp
        self.last_step = last_step(config.training, self.step, self.consumed_samples)
        self.health = Health(config.optimizer.grad_norm_spike_sigma)
        self.health.grad_norms.restore(self.checkpoints.kept.get(_NORMS))
        self.checkpoints.prepare()

    def fit(self) -> int:
        """Trains up to ``train_iters`` steps or ``train_samples`` samples, up to a multiple of ``exit_interval``, or
        until a signal asks to stop. A run that is at its end, this one or an earlier start of it, has its test sets
        evaluated.

        Returns the exit code: 0, or that of the signal as shells report it. Everything up to the last step is saved.
        """
        code = self._train()
        if self.data.test and self.step >= self.last_step:
            evaluate_sets(self.run, self.data.test, self.step, self.schedule)
        return code

    def _train(self) -> int:
        reporter = self._open_reporter()
        train = self.data.train
        first = partial(train.start, self.consumed_samples, self.last_step - self.step, self._left_out())
        watched = self.config.logging, self.engine.module, self.device
        profiler = StepProfiler(*watched, self.clock, rank=self.mesh.rank, first_step=self.first_step)
        with (
            reporter,
            Teller(reporter, self.health, runs_behind=self.runs_behind) as teller,
            StopRequest() as stop,
            profiler,
        ):
            self.ranks.together(first, "reading the first batches", DataError)
            self.clock.restart()
            while self._pass_over() < self.last_step:
                self._check_devices()
                self._tell_batch_size()
                profiler.before(self.step + 1)
                lr = self._set_rates()
                with self.clock.data():
                    read = train.batch(self.consumed_samples)
                batches = [batch.to(self.device) for batch in read]
                report = self._train_step(batches, stop)
                took = self.clock.end_step()
                self.step += 1
                profiler.after(self.step)
                samples = self.batch_sizes.at(self.consumed_samples)
                self.consumed_samples += samples
                validate = self._validate if self._is_due("eval") else None
                try:
                    teller.add(QueuedStep(self.step, report, self._line(lr, took, samples), validate))
                    if teller.stop_requested:
                        second = "; a second signal ends the run at once" if stop.signal is not None else ""
                        why = "data cannot be read" if train.failure() else "a rank lacks data or was asked to stop"
                        logger.info("%s: saving step %d%s", "asked to stop" if second else why, self.step, second)
                    leaving = teller.stop_requested or self._is_due("exit") or self.step == self.last_step
                    if leaving or self.checkpoints.is_due(self.step):
                        teller.settle()
                        self._keep_norms()
                except DataError:  # in validation, which no step hangs on
                    logger.info("validation data cannot be read: saving step %d", self.step)
                    self._keep_norms()
                    self.checkpoints.after_step(self.step, self.consumed_samples, leaving=True)
                    raise
                except TrainingError:
                    self.checkpoints.finish()  # what was good before is not lost
                    raise
                with self.clock.pause() if self.checkpoints.is_due(self.step) else nullcontext():
                    self.checkpoints.after_step(self.step, self.consumed_samples, leaving=leaving)
                if leaving:
                    # A signal to one rank, or data that one cannot read, is the same end for all.
                    unfinished = teller.stop_requested and self.step < self.last_step
                    if unfinished:
                        self.ranks.together(train.check, f"reading beyond step {self.step}", DataError)
                    return 128 + (stop.signal or signal.SIGTERM) if unfinished else 0
        return 0

    def _keep_norms(self) -> None:
        self.checkpoints.kept = {_NORMS: self.health.grad_norms.plain()}

    def _open_reporter(self) -> Reporter:
        total = self.batch_sizes.after(self.consumed_samples, self.last_step - self.step)
        ends = {"first_step": self.step, "last_step": self.last_step, "total_samples": total}
        return self.ranks.together(lambda: Reporter(self.run, **ends), "opening the outputs", TrainingError)

    def _train_step(self, batches: list[Batch], stop: StopRequest) -> PendingReport:
        def stop_requested() -> bool:
            with self.clock.data():  # it waits for what is read ahead
                failure = self.data.train.failure()
            return failure is not None or stop.signal is not None

        return train_step(
            self.run,
            self.engine,
            self.schedule,
            batches,
            before_update=self.checkpoints.before_update,
            stop_requested=stop_requested,  # while the device works; a rank that cannot go on must not leave alone
        )

    def _left_out(self) -> set[int]:
        """Where the steps begin in the order of samples that are to be left out; their data need not be readable."""
        numbers = [n for n in self.config.training.iterations_to_skip if self.step < n < self.last_step]
        return {self.batch_sizes.after(self.consumed_samples, n - 1 - self.step) for n in numbers}

    def _pass_over(self) -> int:
        """Steps done, after those have been counted that are to be left out; the last one of a run never is."""
        while self.step + 1 in self.config.training.iterations_to_skip and self.step + 1 < self.last_step:
            self.step += 1
            self.consumed_samples += self.batch_sizes.at(self.consumed_samples)
            logger.info("step %d is left out, as iterations_to_skip says", self.step)
        return self.step

    def _check_devices(self) -> None:
        interval = self.config.logging.straggler_check_interval
        if interval > 0 and (self.step - self.first_step) % interval == 0:
            with self.clock.pause():
                check_devices(self.run)

    def _tell_batch_size(self) -> None:
        size = self.batch_sizes.at(self.consumed_samples)
        if self.batch_sizes.ramp and size != self._told_size:
            logger.info("global batches of %d samples from step %d on", size, self.step + 1)
            self._told_size = size

    def close(self) -> None:
        """Ends the data threads and frees the folder of checkpoints."""
        self.checkpoints.close()
        for loader in (self.data.train, *self.data.valid.values(), *self.data.test.values()):
            loader.close()

    def _is_due(self, what: str) -> bool:
        training = self.config.training
        intervals = {
            "eval": training.eval_interval,
            "exit": training.exit_interval,
        }
        interval = intervals[what]
        last = self.step == self.last_step and what == "eval" and interval > 0
        return last or (interval > 0 and self.step % interval == 0)

    def _set_rates(self) -> float:
        """Learning rate (returned) and largest gradient norms of the next step."""
        lr = self.rates.learning_rate(self.step, self.consumed_samples)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        # Not the optimizer's own count of steps: after a restart from weights alone that is younger than the run.
        self.engine.optimizer.clip_grad = self.rates.largest_grad_norm(self.step, self.consumed_samples)
        self.engine.optimizer.skip_above = self.health.largest_norm(self.step + 1)
        return lr

    def _validate(self) -> dict[str, float]:
        """The loss over every validation set, by its name."""
        with self.clock.pause():
            return {name: loss_over(self.run, loader, self.schedule) for name, loader in self.data.valid.items()}

    def _line(self, lr: float, took: StepTime, samples: int) -> Callable[[StepReport], StepMetrics]:
        """The metrics of the step of ``samples`` just queued, from what it did."""
        training, model = self.config.training, self.config.model
        tokens = samples * training.seq_length / self.mesh.layout.world_size
        flops = flops_per_token(model, training.seq_length)
        told = self.config.logging.device_peak_tflops
        known = devices.peak_flops(devices.device_name(self.device), self.run.dtype)
        peak = known if told is None else told * 1e12
        now: dict[str, Any] = {  # what the host knows when the step has been queued
            "step": self.step,
            "consumed_tokens": self.consumed_samples * training.seq_length,
            "global_batch_size": samples,
            "lr": lr,
            "peak_memory_gib": devices.peak_memory(self.device) / 2**30 or None,
            **self.checkpoints.take_times(),
        }

        def line(report: StepReport) -> StepMetrics:
            seconds = took.seconds
            return StepMetrics(
                loss=report.loss,
                aux_loss=report.aux_loss if model.is_moe else None,
                z_loss=report.z_loss if model.is_moe else None,
                grad_norm=report.grad_norm,
                skipped=report.skipped or None,
                step_time_s=seconds,
                data_wait_s=took.data_wait,
                pause_s=took.pause or None,
                tokens_per_second_per_device=tokens / seconds,
                tflops_per_device=tokens / seconds * flops / 1e12,
                mfu=mfu(tokens / seconds, flops, peak),
                expert_load_max_over_mean=report.expert_load_max_over_mean,
                router_entropy=report.router_entropy,
                dropped_tokens=report.dropped_tokens if model.is_moe else None,
                **now,
            )

        return line
