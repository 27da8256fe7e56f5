"""Values of the wrong type in a DeepSpeed configuration are errors that say what is needed."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from deepspeed_ext.config_checks import check_kinds, in_one_line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bf16": True}, r'bf16=True must be an object, such as {"enabled": true}'),
        ({"optimizer": "AdamW"}, r'optimizer=.AdamW. must be an object, such as {"type": "AdamW"}'),
        ({"zero_optimization": {"stage": "1"}}, "stage='1' must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 5}}, "stage=5 must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "stage=True must be"),
    ],
)
def test_sections_of_a_wrong_kind(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kinds(config)


def test_errors_become_one_line_with_what_is_needed() -> None:
    assert in_one_line(ValueError("a\n  b")) == "a b"
    assert in_one_line(KeyError("weight")) == "KeyError: 'weight'"
    for zero in ({"stage": 1, "overlap_com": True}, {"stage": 1, "round_robin_gradients": "maybe"}):
        with pytest.raises(Exception) as caught:
            DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})
        key, value = list(zero.items())[1]
        assert in_one_line(caught.value).startswith(f"DeepSpeedZeroConfig: {key}={value!r}: ")
