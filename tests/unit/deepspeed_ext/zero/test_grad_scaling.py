"""Norms of gradients, and the loss scale by DeepSpeed's rule: what a step makes of both."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from deepspeed_ext.zero.grad_scaling import LossScale, StepState, loss_scale_state, sum_of_squares, total_of_squares
from deepspeed_ext.zero.options import LossScaleOptions, ZeroOptions
from deepspeed_ext.zero.stock_files import _stock_loss_scaler

CPU = torch.device("cpu")
GRID = list(itertools.product((1, 2, 5), (1, 2, 3), (False, True), (1.0, 2.0**12)))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_follows_deepspeeds_rule(case: tuple[int, int, bool, float], monkeypatch: pytest.MonkeyPatch) -> None:
    window, hysteresis, refills, minimum = case
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # it asks only whether to log
    oracle = DynamicLossScaler(2.0**16, window, minimum, hysteresis, refills)
    ours = LossScale(LossScaleOptions(2.0**16, True, window, hysteresis, refills, minimum), CPU)
    generator = random.Random(repr(case))
    stopped = 0
    for step in range(400):
        often = 0.7 if step // 50 % 2 else 0.15  # spells of many and of few overflows
        overflow = generator.random() < often or oracle.cur_scale > 2.0**60
        at_minimum = False
        try:
            oracle.update_scale(overflow)
        except Exception as error:
            assert "already at minimum" in str(error)
            at_minimum, stopped = True, stopped + 1
        ours.update(torch.tensor(float(overflow)))
        assert float(ours.scale) == oracle.cur_scale, f"after step {step}"
        assert bool(ours.is_exhausted) == at_minimum
        if at_minimum:  # it raised before it had counted the step
            oracle.last_overflow_iter = oracle.cur_iter
            oracle.cur_iter += 1
        if step % 90 == 89:  # a resume in between changes nothing
            state = ours.state_dict()
            ours = LossScale(LossScaleOptions(8.0, True, window, hysteresis, refills, minimum), CPU)
            ours.load_state_dict(state)
    assert stopped > 0 or case[:2] != (5, 1) or minimum == 1, (
        "the minimum must be reached for this test to mean anything"
    )


def test_a_static_scale_stays() -> None:
    scale = LossScale(LossScaleOptions(128.0, is_dynamic=False), CPU)
    for _ in range(5):
        scale.update(torch.tensor(1.0))
    scale.load_state_dict({"scale": 2.0, "clean_steps": 1.0, "hysteresis_left": 1.0})
    assert float(scale.scale) == 128.0


def test_the_scale_stays_finite() -> None:
    """Without it, gradients of zero would raise the scale to infinity, from which no overflow brings it back."""
    scale = LossScale(LossScaleOptions(2.0**16, window=1), CPU)
    for _ in range(200):
        scale.update(torch.tensor(0.0))
    assert 2.0**64 < float(scale.scale) < math.inf


def test_the_scale_leaves_norm_and_clip_factor_as_they_are() -> None:
    """Powers of two are exact: the same bits as without scaling; the update's factor takes the scale out again."""
    for norm in (0.3, 7.7):
        plain = StepState(CPU, 3, ZeroOptions(max_norm=1.0))
        scaled = StepState(CPU, 3, ZeroOptions(max_norm=1.0, loss_scale=LossScaleOptions(2.0**10)))
        a = plain.scalars(torch.tensor(norm, dtype=torch.float64))
        b = scaled.scalars(torch.tensor(norm * 2.0**10, dtype=torch.float64))
        assert plain.grad_norm == scaled.grad_norm
        assert float(a.scale) == float(b.scale) * 2.0**10
        assert a.scale.dtype == b.scale.dtype == torch.float32


def test_overflow_at_the_smallest_scale_ends_the_run_one_step_later() -> None:
    options = LossScaleOptions(4.0, hysteresis=1, minimum=2.0)
    state = StepState(CPU, 1, ZeroOptions(loss_scale=options))
    told = []
    for norm in (math.inf, math.nan):
        scalars = state.scalars(torch.tensor(norm))
        assert scalars.skip == 1 and scalars.scale == 0
        told.append(state.read_previous_outcome())
    assert told == [False, True] and state.loss_scale is not None and float(state.loss_scale.scale) == 2.0
    state.scalars(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"smallest loss scale, 2\.0"):
        state.read_previous_outcome()
    assert state.skips == 2 and state.applied == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_never_waits_for_the_device() -> None:
    """Synchronizing calls raise in this mode."""
    device = torch.device("cuda")
    state = StepState(device, 2, ZeroOptions(max_norm=1.0, loss_scale=LossScaleOptions(2.0**10)))
    norms = torch.tensor([1.0, math.inf, 2.0], device=device).unbind()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norm in norms:
            state.scalars(norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.skips == 1 and state.applied == 2


def test_files_hold_deepspeeds_scaler_at_the_present_scale() -> None:
    """A universal checkpoint made of our files goes on with it; ``loss_scale_state`` reads it back."""
    state = {"scale": 512.0, "clean_steps": 7.0, "hysteresis_left": 1.0}
    options = LossScaleOptions(window=20, hysteresis=3, minimum=2.0, refills_hysteresis=True)
    optimizer: Any = SimpleNamespace(options=SimpleNamespace(loss_scale=options), loss_scale_state=state)
    scaler = _stock_loss_scaler(optimizer)["loss_scaler"]
    assert isinstance(scaler, DynamicLossScaler)
    assert loss_scale_state(scaler) == state
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift) == (20, 2.0, 3)
    assert scaler.consecutive_hysteresis
    options = LossScaleOptions(is_dynamic=False)
    optimizer = SimpleNamespace(options=SimpleNamespace(loss_scale=options), loss_scale_state=state)
    assert _stock_loss_scaler(optimizer) == {}


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
