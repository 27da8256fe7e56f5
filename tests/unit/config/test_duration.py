"""Batch sizes and lengths of a run against a count step by step, and what a ramp must be."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron.optimus.config.duration import BatchSizes, last_step, last_step_of_process, total_samples
from megatron.optimus.config.schema import TrainingConfig

RAMPS = [(8, 4, 4, 12), (16, 4, 4, 50), (64, 1, 7, 1000), (12, 2, 5, 1), (100, 10, 9, 97), (48, 16, 32, 5)]


def size_at(position: int, full: int, first: int, increment: int, samples: int) -> int:
    """Megatron's rule: equal shares of the samples for as many increments as there are, then the full batch."""
    if position > samples:
        return full
    return first + int(position / Fraction(samples, (full - first) // increment)) * increment


@pytest.mark.parametrize(("full", "ramp"), [(8, ())] + [(full, tuple(ramp)) for full, *ramp in RAMPS])
def test_closed_forms_equal_the_count_step_by_step(full: int, ramp: tuple[int, ...]) -> None:
    sizes = BatchSizes(full, ramp)
    starts = [0]
    while starts[-1] < 1200:
        expected = size_at(starts[-1], full, *ramp) if ramp else full
        assert sizes.at(starts[-1]) == expected
        starts.append(starts[-1] + expected)
    for step, start in enumerate(starts):
        assert sizes.after(0, step) == start
        for later in range(step, len(starts)):
            assert sizes.after(start, later - step) == starts[later]
            assert sizes.steps(start, starts[later]) == later - step
            assert sizes.steps(start, starts[later] - 1) == max(0, later - step - 1)
    for position in range(300):  # where no step of this run begins, as after a resumption with other sizes
        step = 0
        while sizes.after(position, step + 1) <= 500:
            step += 1
        assert sizes.steps(position, 500) == step
        assert sizes.at(position) == [size for first, size in sizes.stages() if first <= position][-1]


def test_a_run_ends_with_the_last_whole_batch() -> None:
    assert (last_step(TrainingConfig(train_iters=7)), total_samples(TrainingConfig(train_iters=7))) == (7, 56)
    constant = TrainingConfig(train_iters=7, train_samples=71)
    assert (last_step(constant), total_samples(constant)) == (8, 64)
    ramp = TrainingConfig(train_samples=71, global_batch_size=16, rampup_batch_size=[4, 4, 48])
    assert (last_step(ramp), total_samples(ramp)) == (8, 56)
    assert last_step(ramp, step=100, position=24) == 103, "a run that went on from elsewhere ends at the same samples"
    short = TrainingConfig(train_samples=10, global_batch_size=16, rampup_batch_size=[4, 4, 48])
    assert (last_step(short), total_samples(short)) == (2, 8), "within the ramp too"


def test_a_process_ends_at_the_next_multiple_of_the_exit_interval() -> None:
    every_ten = TrainingConfig(train_iters=25, exit_interval=10)
    assert [last_step_of_process(every_ten, step, 25) for step in (0, 9, 10, 20)] == [10, 10, 20, 25]
    assert last_step_of_process(TrainingConfig(train_iters=25), 3, 25) == 25
    left_out = TrainingConfig(train_iters=25, exit_interval=10, iterations_to_skip=[10])
    assert last_step_of_process(left_out, 5, 25) == 20, "a step that is left out ends nothing"
