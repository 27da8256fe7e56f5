"""Schedule-free AdamW and SGD after ten steps against the authors' package, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import own_optimizer
from deepspeed_ext.optimizers.schedule_free import warmup_and_weight
from tests.unit.deepspeed_ext.optimizers.oracles import (
    B2,
    DECAY,
    LR,
    Cut,
    Make,
    check_against_oracle,
)

schedulefree = pytest.importorskip("schedulefree")


def schedule_free_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.AdamWScheduleFree(params, lr=LR, betas=B2, weight_decay=DECAY, warmup_steps=4)


def schedule_free_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return schedulefree.SGDScheduleFree(params, lr=LR, weight_decay=DECAY, warmup_steps=4)


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("schedule-free-adamw", schedule_free_adamw, {"betas": B2, "warmup_iters": 4}),
        ("schedule-free-sgd", schedule_free_sgd, {"warmup_iters": 4}),
    ],
)
def test_weights_equal_the_oracle_alone_and_on_shards(
    name: str, make: Make, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_oracle(name, make, options, monkeypatch)


def test_the_weights_of_the_average_are_those_of_the_warm_up() -> None:
    for warmup in (0, 1, 5):
        factors = [min(1.0, t / max(1, warmup)) for t in range(1, 12)]
        for t, factor in enumerate(factors, start=1):
            found, weight = warmup_and_weight(torch.tensor(float(t)), warmup)
            assert found.item() == pytest.approx(factor)
            assert weight.item() == pytest.approx(factor**2 / sum(f**2 for f in factors[:t]))


@pytest.mark.parametrize("name", ["schedule-free-adamw", "schedule-free-sgd"])
def test_schedule_free_states_are_weights(name: str) -> None:
    optimizer = own_optimizer(name)([torch.zeros(1)], state_dtype="bf16")
    with pytest.raises(ValueError, match="state_dtype='bf16': schedule-free optimizers keep z"):
        Cut(optimizer, 512, torch.bfloat16)
