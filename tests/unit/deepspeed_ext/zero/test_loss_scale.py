"""The loss scale on the device against DeepSpeed's on the host, over the same overflows."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from deepspeed_ext.zero.grad_scaling import LossScale, StepState, loss_scale_state
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 0.0}, "loss scale 0.0"),
        ({"initial": math.inf}, "loss scale inf"),
        ({"minimum": -1.0}, "min_loss_scale -1.0"),
        ({"window": 0}, "loss_scale_window=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_bad_options(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaleOptions(**arguments)  # type: ignore[arg-type]


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
