"""TensorBoard gets every number of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.training.trackers.tensorboard import TensorBoardTracker
from tests.unit.training.test_metrics import metrics


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(str(tmp_path))
    tracker.log(metrics(1))
    tracker.log(metrics(2, valid_loss=3.5, valid_losses={"web": 2.5}, recorded={"attention/entropy": 1.5}))
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 8.0), (2, 4.0)]
    assert [event.step for event in events.Scalars("valid_loss")] == [2]
    assert [event.value for event in events.Scalars("valid_loss/web")] == [2.5]
    assert [event.value for event in events.Scalars("attention/entropy")] == [1.5]
    assert "mfu" not in events.Tags()["scalars"]  # unknown


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard_dir='tb'.*pip install tensorboard"):
        TensorBoardTracker("tb")
