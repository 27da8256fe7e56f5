"""The samples of a checkpoint follow from its steps and batch sizes."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.optimus.checkpoint import CheckpointError, Manifest
from megatron.optimus.training.data_position import START_FIELD, STEPS_FIELD, check_position, position_start

TRAINING = {"global_batch_size": 8, "rampup_batch_size": [], "seq_length": 32}
RAMP = {**TRAINING, "rampup_batch_size": [2, 2, 30]}  # 2, 4, 6 and 8 from samples 0, 10, 20 and 30 on


def manifest(step: int, samples: int, training: Any = TRAINING, **metadata: Any) -> Manifest:
    config = {} if training is None else {"training": training}
    return Manifest("full", step, samples, config, metadata, {}, {})


@pytest.mark.parametrize(
    "found",
    [
        manifest(4, 32, **{START_FIELD: [0, 0]}),
        manifest(9, 140, **{START_FIELD: [4, 100], STEPS_FIELD: 8}),
        manifest(5, 10, RAMP, **{START_FIELD: [0, 0]}),
        manifest(7, 18, RAMP, **{START_FIELD: [0, 0]}),
        manifest(0, 0, None),
        manifest(4, 32),
    ],
)
def test_what_agrees(found: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    check_position(found, warn=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (manifest(4, 40, **{START_FIELD: [0, 0]}), "consumed_samples=40 are not the 32 that follow from step 4"),
        (manifest(4, 0, **{START_FIELD: [0, 0]}), "consumed_samples=0 are not the 32"),
        (manifest(3, 108, **{START_FIELD: [4, 100]}), "consumed_samples=108 are not"),
        (manifest(7, 14, RAMP, **{START_FIELD: [0, 0]}), "consumed_samples=14 are not the 18"),
        (manifest(4, 32, **{START_FIELD: [0]}), "is not .step, samples."),
        (manifest(4, 32, **{START_FIELD: [0, -1]}), "is not .step, samples."),
        (manifest(4, 32, **{STEPS_FIELD: [4]}), "is not a number of optimizer steps"),
        (manifest(4, 32, **{STEPS_FIELD: True}), "is not a number of optimizer steps"),
        (manifest(4, 32, {**TRAINING, "global_batch_size": 0}), "no run can have"),
        (manifest(4, 32, {**TRAINING, "global_batch_size": "8"}), "no run can have"),
        (manifest(4, 32, {**TRAINING, "seq_length": [32]}), "no run can have"),
        (manifest(4, 32, {**TRAINING, "seq_length": 0}), "no run can have"),
        (manifest(4, 32, {**TRAINING, "rampup_batch_size": [1, 0, 3]}), "no run can have"),
        (manifest(4, 32, {"rampup_batch_size": [1, 1, 9], "global_batch_size": 1 << 60, "seq_length": 1}), "no run"),
    ],
)
def test_what_contradicts_itself(found: Manifest, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_position(found, warn=False)


def test_an_earlier_version_did_not_record_where_its_batch_size_began(caplog: pytest.LogCaptureFixture) -> None:
    check_position(manifest(4, 40), warn=False)
    assert not caplog.records
    check_position(manifest(4, 40), warn=True)
    assert "right only for an import, or if the batch size changed" in caplog.text


def test_batch_sizes_hold_from_where_they_changed() -> None:
    before = manifest(6, 48, **{START_FIELD: [2, 16]})
    assert position_start(before, TRAINING, 6, 48) == [2, 16]
    for change in ({"global_batch_size": 16}, {"seq_length": 64}, {"rampup_batch_size": [2, 2, 30]}):
        assert position_start(before, TRAINING | change, 6, 48) == [6, 48]
    assert position_start(manifest(6, 48), TRAINING, 6, 48) == [6, 48]
