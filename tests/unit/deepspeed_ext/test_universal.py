"""Universal checkpoints: the tag, and DeepSpeed's loss scaler."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from deepspeed_ext.torch_files import OpaqueObject, read_torch
from deepspeed_ext.universal import locate
from deepspeed_ext.zero.grad_scaling import LossScale, loss_scale_state
from deepspeed_ext.zero.options import LossScaleOptions


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_a_loss_scaler_goes_on_as_deepspeeds_would(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # it asks only whether to log
    window, hysteresis = 4, 2
    oracle = DynamicLossScaler(2.0**16, window, 1.0, hysteresis, False)
    generator = random.Random(steps)
    overflows = [generator.random() < 0.15 for _ in range(steps + 60)]
    for overflow in overflows[:steps]:
        oracle.update_scale(overflow)
    torch.save({"loss_scaler": oracle}, tmp_path / "optimizer_state.pt")
    scaler = read_torch(tmp_path / "optimizer_state.pt")["loss_scaler"]
    assert type(scaler) is OpaqueObject
    state = loss_scale_state(scaler)
    assert state is not None
    ours = LossScale(LossScaleOptions(8.0, True, window, hysteresis), torch.device("cpu"))
    ours.load_state_dict(state)
    for overflow in overflows[steps:]:
        assert float(ours.scale) == oracle.cur_scale
        oracle.update_scale(overflow)
        ours.update(torch.tensor(float(overflow)))


def test_other_scalers_change_nothing(tmp_path: Path) -> None:
    torch.save(LossScaler(128.0), tmp_path / "static.pt")
    assert loss_scale_state(read_torch(tmp_path / "static.pt")) is None
    assert loss_scale_state(None) is None


def test_the_tag_is_a_plain_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latest_universal does not exist"):
        locate(str(tmp_path), None)
    (tmp_path / "latest_universal").write_text("../elsewhere")
    with pytest.raises(ValueError, match="not the plain name"):
        locate(str(tmp_path), None)
    (tmp_path / "latest_universal").write_text("step3")
    with pytest.raises(ValueError, match="it is not a universal checkpoint"):
        locate(str(tmp_path), None)
    (tmp_path / "step3/zero").mkdir(parents=True)
    assert locate(str(tmp_path), None) == locate(str(tmp_path), "step3") == tmp_path / "step3"
