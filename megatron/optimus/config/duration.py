"""Batch size of each optimizer step, length of a run, and lengths of its learning-rate schedule.

A run is measured in steps (``train_iters``) or in samples (``train_samples``). During a batch-size ramp the two are not
proportional, so a ramp needs ``train_samples``. A position is the number of samples consumed before a step, which is
the whole state of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.optimus.config.values import ConfigError, one_of, require

if TYPE_CHECKING:
    from megatron.optimus.config.schema import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class BatchSizes:
    """The batch size as a function of the position at which a step begins.

    A step that begins in a stage of the ramp has that stage's size, also where it reaches into the next stage.

    Args:
        full: ``global_batch_size``.
        ramp: empty, or ``rampup_batch_size``: the first size, the increment of each stage, and the samples of the ramp,
            which its stages divide evenly.
    """

    full: int
    ramp: tuple[int, ...] = ()

    def at(self, position: int) -> int:
        """Returns the batch size of the step that begins at ``position``."""
        if not self.ramp:
            return self.full
        first, increment, samples = self.ramp
        return min(self.full, first + increment * (position * self._num_increments // samples))

    def stages(self) -> list[tuple[int, int]]:
        """Returns (first position, batch size) of every stage; with more stages than samples some are empty."""
        if not self.ramp:
            return [(0, self.full)]
        first, increment, samples = self.ramp
        count = self._num_increments
        return [(-(-number * samples // count), first + number * increment) for number in range(count + 1)]

    def after(self, position: int, steps: int) -> int:
        """Returns the position, in samples, after ``steps`` more steps from ``position``.

        Zero or fewer steps return ``position``. ``position`` may lie inside or behind the ramp.
        """
        for size, end in self._stage_ends():
            if end is None:
                return position + max(0, steps) * size
            taken = max(0, min(steps, -(-(end - position) // size)))
            position, steps = position + taken * size, steps - taken
        return position

    def steps(self, position: int, end: int) -> int:
        """Returns the number of whole steps between ``position`` and ``end``."""
        count = 0
        for size, stage_end in self._stage_ends():
            taken = max(0, (end - position) // size)
            if stage_end is not None:
                taken = max(0, min(taken, -(-(stage_end - position) // size)))
            count, position = count + taken, position + taken * size
        return count

    @property
    def _num_increments(self) -> int:
        first, increment, _ = self.ramp
        return (self.full - first) // increment

    def _stage_ends(self) -> Iterator[tuple[int, int | None]]:
        """Yields (batch size, first position after the stage) of every stage; None for the last."""
        stages = self.stages()
        ends = [first for first, _ in stages[1:]]
        yield from zip((size for _, size in stages), [*ends, None], strict=True)


def batch_sizes(training: TrainingConfig) -> BatchSizes:
    """Returns the batch sizes of a run."""
    return BatchSizes(training.global_batch_size, tuple(training.rampup_batch_size))


def last_step(training: TrainingConfig, step: int = 0, position: int = 0) -> int:
    """Returns the number of a run's last optimizer step.

    Args:
        training: with ``train_samples``, the run ends with the last whole step that fits.
        step: steps done, possibly with other batch sizes.
        position: samples consumed in them.
    """
    if training.train_samples is None:
        return training.train_iters
    return step + batch_sizes(training).steps(position, training.train_samples)


def last_step_of_process(training: TrainingConfig, step: int, end: int) -> int:
    """Returns the step after which a process that begins at ``step`` ends by itself: ``end``, the run's last, or the
    first multiple of ``exit_interval`` that is trained."""
    interval = training.exit_interval
    multiples = range((step // interval + 1) * interval, end, interval) if interval else ()
    return next((number for number in multiples if number not in training.iterations_to_skip), end)


def total_samples(training: TrainingConfig) -> int:
    """Returns the samples of the whole run."""
    return batch_sizes(training).after(0, last_step(training))


class ScheduleLengths(NamedTuple):
    """Lengths of the learning-rate schedule, in samples where ``train_samples`` is given, else in steps."""

    warmup: int
    decay_end: int
    wsd_decay: int


def schedule_lengths(optimizer: OptimizerConfig, training: TrainingConfig) -> ScheduleLengths:
    """Returns the schedule's lengths. In a run measured in samples, an option in steps counts full batches."""
    if training.train_samples is None:
        end = optimizer.lr_decay_iters or training.train_iters
        return ScheduleLengths(optimizer.lr_warmup_iters, end, optimizer.lr_wsd_decay_iters or 0)
    full = training.global_batch_size

    def samples(name: str, otherwise: int) -> int:
        given, steps = getattr(optimizer, f"lr_{name}_samples"), getattr(optimizer, f"lr_{name}_iters")
        if given is not None:
            return int(given)
        return otherwise if steps is None else steps * full

    return ScheduleLengths(samples("warmup", 0), samples("decay", training.train_samples), samples("wsd_decay", 0))


def check_schedule(optimizer: OptimizerConfig) -> None:
    """Raises ConfigError for a warm-up longer than the decay, and for WSD without its decay length or vice versa."""
    for unit in ("iters", "samples"):
        warmup, end = getattr(optimizer, f"lr_warmup_{unit}"), getattr(optimizer, f"lr_decay_{unit}")
        require(
            None in (warmup, end) or warmup <= end,
            f"lr_warmup_{unit}={warmup} exceeds lr_decay_{unit}={end}; use at most {end}",
        )
    names = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
    given = [f"{name}={getattr(optimizer, name)}" for name in names if getattr(optimizer, name) is not None]
    style = optimizer.lr_decay_style.value
    require(
        style != "WSD" or bool(given),
        "lr_decay_style=WSD needs lr_wsd_decay_iters, the steps of the final decay; use a tenth of all",
    )
    require(
        style == "WSD" or not given,
        f"{' '.join(given)} is for lr_decay_style=WSD, and this is {style}; leave it out, or change the style",
    )


def check_duration(training: TrainingConfig) -> None:
    """Raises ConfigError for a ramp that does not end at the full batch, and for a run without a step."""
    ramp, full, samples = training.rampup_batch_size, training.global_batch_size, training.train_samples
    if ramp:
        example = "for example 32 32 1000000"
        require(
            len(ramp) == 3 and min(ramp) >= 1,
            f"rampup_batch_size={_words(ramp)}: give three whole numbers above 0, the first batch size, the "
            f"increment of each stage and the samples of the ramp, {example}",
        )
        require(
            samples is not None,
            f"rampup_batch_size={_words(ramp)} needs a run measured in samples: set train_samples, which "
            "replaces train_iters",
        )
        first, increment, _ = ramp
        require(first < full, f"rampup_batch_size begins with {first}, which must be below global_batch_size={full}")
        if (full - first) % increment:
            good = [size for size in range(increment, 0, -1) if (full - first) % size == 0][:1]
            raise ConfigError(
                f"rampup_batch_size={_words(ramp)} does not end at global_batch_size={full}: the increment {increment} "
                f"must divide {full} - {first} = {full - first}; use {one_of(good)}, or another size"
            )
    size = ramp[0] if ramp else full
    require(
        samples is None or samples >= size,
        f"train_samples={samples} is less than the first global batch of {size}; use {size} or more",
    )


def check_batch_sizes(sizes: BatchSizes, micro_batch_size: int, data_parallel_size: int) -> None:
    """Raises ConfigError unless every global batch is a whole number of micro-batches on every rank."""
    for name, value in (("global_batch_size", sizes.full), ("micro_batch_size", micro_batch_size)):
        require(value >= 1, f"{name}={value} must be at least 1")
    unit = micro_batch_size * data_parallel_size
    bad = next((size for _, size in reversed(sizes.stages()) if size % unit), None)
    if bad is None:
        return
    factors = f"micro_batch_size={micro_batch_size} x data-parallel size {data_parallel_size} = {unit}"
    if bad != sizes.full:
        raise ConfigError(
            f"rampup_batch_size={_words(sizes.ramp)} has a stage of {bad} samples, which must be a multiple of "
            f"{factors}; let the ramp begin with and grow by multiples of {unit}"
        )
    below, above = bad // unit * unit, (bad // unit + 1) * unit
    raise ConfigError(
        f"global_batch_size={bad} must be a multiple of {factors}; use {one_of([below, above] if below else [above])}"
    )


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
