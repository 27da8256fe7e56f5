"""Partial norms, and what a step makes of the whole one."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_ext.zero.grad_scaling import StepState, sum_of_squares, total_of_squares
from deepspeed_ext.zero.options import ZeroOptions


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 100_003])
def test_sum_of_squares(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert sum_of_squares(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 4999])
def test_non_finite_shows(bad: float, position: int) -> None:
    x = torch.ones(5000)
    x[position] = bad
    assert not math.isfinite(sum_of_squares(x).item())


def test_a_long_constant_does_not_stall() -> None:
    """One fp32 accumulator stops growing at 2^24 equal addends."""
    x = torch.full((2**25,), 1.0)
    assert sum_of_squares(x).item() == pytest.approx(2**25, rel=1e-6)


def test_total_over_tensors() -> None:
    tensors = [torch.full((5000,), 2.0), torch.full((3,), 1.0).bfloat16(), torch.zeros(0)]
    assert total_of_squares(tensors, torch.device("cpu")).item() == pytest.approx(20003.0, rel=1e-6)
    assert total_of_squares([], torch.device("cpu")).tolist() == [0.0]


def test_scalars_of_a_step_clip_count_and_skip() -> None:
    state = StepState(torch.device("cpu"), 4, ZeroOptions(max_norm=1.0, clip_after_steps=1))
    norm = torch.tensor(40.0, dtype=torch.float64)  # of the sum over 4 ranks: the mean's is 10
    first = state.scalars(norm)
    assert (first.scale.item(), first.skip.item(), first.step.item()) == (0.25, 0.0, 1.0)
    assert state.grad_norm == 10.0 and state.applied == 1 and not state.read_previous_outcome()
    second = state.scalars(norm)
    assert second.scale.item() == pytest.approx(0.025, rel=1e-6) and second.step.item() == 2
    assert not state.read_previous_outcome()
    skipped = state.scalars(torch.tensor(math.nan))
    assert (skipped.scale.item(), skipped.skip.item(), skipped.step.item()) == (0.0, 1.0, 3.0)
    assert state.was_skipped and state.applied == 2 and state.skips == 1
    assert not state.read_previous_outcome() and state.settled_skips == 0, "the host is told one step later"
    small = state.scalars(norm / 1000)
    assert (small.scale.item(), small.step.item()) == (0.25, 3.0)
    assert state.read_previous_outcome() and state.settled_skips == 1 and not state.was_skipped
    unclipped, clipped = state.scalars(norm, 0.0), state.scalars(norm, 5.0)
    assert unclipped.scale.item() == 0.25 and clipped.scale.item() == pytest.approx(0.125, rel=1e-6)
    spike, usual = state.scalars(norm, skip_above=9.99), state.scalars(norm, skip_above=10.0)  # the norm is 10
    assert (spike.scale.item(), spike.skip.item()) == (0.0, 1.0) and usual.skip.item() == 0.0
    assert spike.step.item() == usual.step.item() == 6.0, "a step that is skipped does not count"


def test_without_overflow_checks_only_errors_skip() -> None:
    state = StepState(torch.device("cpu"), 1, ZeroOptions(max_norm=1.0, check_grad_overflow=False))
    none, failed = torch.tensor(0.0), torch.tensor(math.nan)
    for norm in (math.inf, math.nan):
        taken = state.scalars(torch.tensor(norm), errors=none)
        assert (taken.scale.item(), taken.skip.item()) == (0.0, 0.0), "what is finite counts as zero"
    assert state.scalars(torch.tensor(4.0), errors=none).scale.item() == pytest.approx(0.25, rel=1e-6)
    broken = state.scalars(failed, errors=failed)
    assert (broken.scale.item(), broken.skip.item()) == (0.0, 1.0) and state.applied == 3


def test_the_host_counts_applied_steps_from_what_the_step_before_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step has the number of the next one, also right after a checkpoint has set the count."""
    state = StepState(torch.device("cpu"), 1.0, ZeroOptions())
    found, expected = [], []
    for number, norm in enumerate([1.0, math.nan, math.nan, 1.0, 1.0, math.inf, 1.0]):
        if number == 4:
            state.applied = 40
        scalars = state.scalars(torch.tensor(norm))
        expected.append(int(scalars.step))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda self: pytest.fail("the host waits for this step"))
            found.append(scalars.host_step)
        state.read_previous_outcome()
    assert found == expected == [1, 2, 2, 2, 41, 42, 42]
