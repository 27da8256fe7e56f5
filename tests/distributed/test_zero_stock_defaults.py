"""Keys that a ported DeepSpeed configuration leaves out, or sets to other than the default: as in stock DeepSpeed."""

from __future__ import annotations

import copy
import math
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

WORLD = 2
SGD = {"type": "SGD", "params": {"lr": 1.0}}
BF16: dict[str, Any] = {"enabled": True}


def _updates(initialize: Any, additions: dict[str, Any], values: list[float]) -> list[torch.Tensor]:
    """The weights after each of the steps whose gradients have these values (one entry, the others are 1)."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": {"stage": 1}, **additions}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = initialize(model=model, config=copy.deepcopy(config))
    dtype = next(engine.module.parameters()).dtype
    seen = []
    for value in values:
        out = engine(torch.ones(1, 2, dtype=dtype))
        engine.backward((out * torch.tensor([value, 1.0], dtype=dtype)).sum())
        engine.step()
        seen.append(engine.module.weight.detach().float().clone())
    return seen


def _both(rank: int, world: int, additions: dict[str, Any], values: list[float]) -> list[Any]:
    deepspeed_ext.init_distributed()
    found = [_updates(initialize, additions, values) for initialize in (deepspeed.initialize, deepspeed_ext.initialize)]
    deepspeed_ext.shutdown()
    return found


@pytest.mark.parametrize("clipping", [{}, {"gradient_clipping": 0.0}, {"gradient_clipping": 2.0}])
def test_an_absent_gradient_clipping_is_deepspeeds(clipping: dict[str, float]) -> None:
    for stock, ours in run_distributed(_both, WORLD, clipping, [400.0, 0.25]):
        norm = float(ours[0].norm())
        expected = clipping.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT) or math.sqrt(2 * 400**2 + 2)
        assert abs(norm - expected) < 1e-4 * expected
        for a, b in zip(stock, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("check", "clipping", "value"),
    [(True, 1.0, math.inf), (False, 1.0, math.inf), (False, 1.0, math.nan), (False, 0.0, math.inf)],
)
def test_check_grad_overflow_is_deepspeeds(check: bool, clipping: float, value: float) -> None:
    additions = {"bf16": {**BF16, "check_grad_overflow": check}, "gradient_clipping": clipping}
    for stock, ours in run_distributed(_both, WORLD, additions, [0.5, value, 0.5]):
        for number, (a, b) in enumerate(zip(stock, ours, strict=True)):
            # Where stock has an infinity, the update kernel may have NaN.
            masked = [torch.where(w.isfinite(), w, math.nan) for w in (a, b)]
            torch.testing.assert_close(*masked, rtol=0.01, atol=0, equal_nan=True)
            assert b.isfinite().all() == (check or number == 0)
