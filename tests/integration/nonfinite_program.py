"""The training program with a device that is bad on rank 1: from step 4 on, one layer's output is not finite there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from megatron.optimus import pretrain
from megatron.optimus.training import trainer

FIRST_BAD_STEP = 4
_FORWARDS = [0]


def main(argv: Sequence[str]) -> int:
    """``pretrain.main`` whose rank 1 is bad."""
    build = trainer.build_model

    def build_bad(run: Any, **options: Any) -> Any:
        model = build(run, **options)
        if os.environ["RANK"] == "1":
            model.get_submodule("layers.1.attention.o_proj").register_forward_hook(_spoil)
        return model

    trainer.build_model = build_bad
    return pretrain.main(argv)


def _spoil(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    _FORWARDS[0] += torch.is_grad_enabled()
    return output * float("nan") if _FORWARDS[0] >= 2 * FIRST_BAD_STEP else output  # two micro-batches a step
