"""deepspeed.utils' safe_get_full_* and safe_set_full_* on parameters that our optimizer has sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

import deepspeed_ext
from tests.helpers import run_distributed

WIDTH, WORLD, LR = 40, 2, 1e-2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.first(x))).square().mean()


def _input(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _serial(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Mean gradients, those of the experts from this rank's tokens alone, and weights after a step of AdamW."""
    model = _Model()
    losses = [model(_input(r)) for r in range(WORLD)]
    experts = torch.autograd.grad(losses[rank] / WORLD, list(model.expert.parameters()), retain_graph=True)
    sum(losses[1:], start=losses[0]).div(WORLD).backward()
    for param, gradient in zip(model.expert.parameters(), experts, strict=True):
        param.grad = gradient
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    torch.optim.AdamW(model.parameters(), lr=LR).step()
    return gradients, {name: param.detach().clone() for name, param in model.named_parameters()}


def _access(rank: int, world: int, stage: int, dtype: str) -> None:
    gradients, weights = _serial(rank)
    model = _Model()
    engine, optimizer, *_ = deepspeed_ext.initialize(
        model=model,
        optimizer=torch.optim.AdamW([{"params": list(model.parameters()), "state_dtype": dtype}], lr=LR),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 700},  # every matrix lies in several buckets
        },
        is_expert=lambda name: "ep_size_2" if "expert" in name else None,
    )
    named = dict(engine.module.named_parameters())

    def backward() -> None:
        engine.backward(engine(_input(rank)))

    def check(found: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max()), (
            found.flatten()[:4],
            wanted.flatten()[:4],
            tolerance,
        )

    backward()
    for name, param in named.items():
        check(safe_get_full_grad(param), gradients[name])
    engine.step()
    for name, param in named.items():
        check(safe_get_full_fp32_param(param), weights[name])
        coarse = 1e-5 if dtype == "fp32" else 0.13  # codes are 1/8 apart
        check(safe_get_full_optimizer_state(param, "exp_avg"), 0.1 * gradients[name], coarse)
        assert safe_get_full_grad(param) is None, "it belongs to the step that was taken"
    with pytest.raises(ValueError, match=r"keeps no state .momentum. of .first\.weight.; it has exp_avg, exp_avg_sq"):
        safe_get_full_optimizer_state(named["first.weight"], "momentum")
    with pytest.raises(RuntimeError, match=r".first\.bias. has no reduced gradient to set"):
        safe_set_full_grad(named["first.bias"], torch.zeros(WIDTH))

    # What is set is what the next step works with.
    target = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for name, p in named.items()}
    backward()
    for name, param in named.items():
        safe_set_full_fp32_param(param, target[name])
        assert torch.equal(param.detach(), target[name]), "no rank has old values beside new ones"
        safe_set_full_optimizer_state(param, torch.ones_like(target[name]), "exp_avg")
        safe_set_full_grad(param, torch.full_like(param, 0.5))
        check(safe_get_full_fp32_param(param), target[name])
        check(safe_get_full_grad(param), torch.full_like(target[name], 0.5))
    optimizer.param_groups[0]["lr"] = 0.0
    engine.step()
    for name, param in named.items():
        assert torch.equal(param.detach(), target[name]), "the weights follow with the step"
        coarse = 1e-5 if dtype == "fp32" else 0.13  # codes are 1/8 apart
        check(safe_get_full_optimizer_state(param, "exp_avg"), torch.full_like(target[name], 0.9 + 0.1 * 0.5), coarse)
    assert copy.deepcopy(engine.module)(_input(rank)).ndim == 0, "copies have nothing to do with the optimizer"
    engine.destroy()
    assert safe_get_full_fp32_param(named["first.weight"]) is None


def _all(rank: int, world: int) -> None:
    for stage, dtype in ((1, "fp32"), (2, "int8")):
        _access(rank, world, stage, dtype)
    deepspeed_ext.shutdown()


def test_full_values_of_sharded_parameters() -> None:
    run_distributed(_all, WORLD)
