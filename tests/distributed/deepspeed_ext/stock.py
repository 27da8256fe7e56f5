"""What stock DeepSpeed lacks in early versions of the range, for tests that compare with it."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config

import deepspeed_ext

HAS_TORCH_STYLE = hasattr(DeepSpeedEngine, "scale")  # 0.18.3: loss.backward(), and assertions about the loss
HAS_NARROW_MASTERS = "bf16_optimizer_states" in DeepSpeedBF16Config.model_fields  # 0.18.3


def config_for(initialize: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A copy of the configuration, for stock without what its version does wrong.

    Before 0.18.3 its stage 2 keeps the gradients of a step's last micro-batch alone: stage 1, which adds them up,
    computes the same. Before 0.18.1 it has no bucket for fp32 gradients that travel in bf16: they travel in fp32.
    """
    own = copy.deepcopy(config)
    if initialize is not deepspeed_ext.initialize and not HAS_TORCH_STYLE and own["zero_optimization"]["stage"] == 2:
        own["zero_optimization"]["stage"] = 1
    if initialize is not deepspeed_ext.initialize and deepspeed.__version__ < "0.18.1":
        own.pop("communication_data_type", None)
    return own
