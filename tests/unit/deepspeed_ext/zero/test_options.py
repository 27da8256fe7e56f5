"""Options of the sharded optimizer that cannot be."""

from __future__ import annotations

import math

import pytest

from deepspeed_ext.zero.options import LossScaleOptions


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
