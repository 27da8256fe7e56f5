"""Where values that are not finite begin: the layer, its gradient or its weights, and the samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatron.optimus.platform.ranks import Ranks
from megatron.optimus.training.nonfinite import NonFiniteOrigin, NonFiniteSource


class Breaks(nn.Module):
    """The identity, which may make its output or its gradient NaN in one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), Breaks(), nn.Linear(3, 3))


def source_of(model: nn.Module, ranks: Any = None) -> NonFiniteSource:
    return NonFiniteSource(model, ranks or Ranks.alone(), lambda position, number: f"samples of {position}/{number}")


def step(source: NonFiniteSource, model: nn.Sequential, broken: int | None, x: float = 1.0, position: int = 40) -> None:
    """Two micro-batches; the layer in the middle breaks in one of them."""
    source.begin_step()
    losses = []
    for number in range(2):
        model[1].factor = math.nan if number == broken else 1.0
        loss = model(torch.full((1, 3), x)).square().sum()
        loss.backward()
        losses.append(loss.detach())
    source.end_step(position, losses)


def test_the_first_layer_is_named_with_its_samples() -> None:
    model = model_of()
    source = source_of(model)
    step(source, model, broken=1)
    assert source.describe() == NonFiniteOrigin("", is_device=False), "nothing is looked at before a skipped step"
    source.watch(is_skipped=True)
    step(source, model, broken=1)
    found = source.describe()
    assert found.text == "They begin in changing places (rank 0: the output of 1, in samples of 40/1)"
    assert not found.is_device
    source.watch(is_skipped=False)
    step(source, model, broken=1)
    assert source.describe().text == "" and not model[1]._forward_hooks


def test_a_layer_that_gets_such_values_is_not_named_for_them() -> None:
    """They came from another rank, which names its layer; here the loss is the first to be named."""
    model = model_of()
    source = source_of(model)
    source.watch(is_skipped=True)
    step(source, model, broken=None, x=math.nan)
    assert "rank 0: the loss, in samples of 40/0" in source.describe().text


def test_weights_are_named_before_the_outputs_that_they_make() -> None:
    model = model_of()
    source = source_of(model)
    source.watch(is_skipped=True)
    with torch.no_grad():
        model[0].bias[1] = math.inf
    step(source, model, broken=None)
    assert "the weights of 0, in samples of 40/0" in source.describe().text


def test_a_gradient_that_a_layer_breaks_is_named() -> None:
    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, grad.sum(0) * math.nan

    model = model_of()
    model[1].forward = lambda x: Gradient.apply(x, model[1].weight)
    source = source_of(model)
    source.watch(is_skipped=True)
    step(source, model, broken=None)
    assert "the gradient of 1, in samples of 40/0" in source.describe().text


class Others:
    """In the place of Ranks: what the ranks found."""

    def __init__(self, *found: Sequence[tuple[str, str]], looked_at: int = 2) -> None:
        self.found = [json.dumps([f"node{rank}", steps, looked_at]).encode() for rank, steps in enumerate(found)]

    def all_gather_bytes(self, own: bytes) -> list[bytes]:
        return self.found


LAYER, LOSS = ("the output of 1", "samples 4 to 7"), ("the loss", "samples 8 to 11")


@pytest.mark.parametrize(
    ("ranks", "text", "is_device"),
    [
        (Others([], []), "", False),
        (
            Others([LAYER, LAYER], [LOSS, LOSS], []),
            "They came first on rank 0 of node node0, in the output of 1, in ",
            True,
        ),
        (
            Others([LAYER, LAYER], [LAYER, LAYER], []),
            "They came first on rank 0 of node node0 (and on ranks 1), in",
            True,
        ),
        (Others([LAYER], [], []), "They begin in changing places (rank 0: the output of 1, in samples 4 to 7)", False),
        (
            Others([LAYER, LAYER], [LAYER, LAYER]),
            "They begin on all 2 ranks alike (mostly in the output of 1; on ",
            False,
        ),
        (
            Others([LOSS, LOSS], [LOSS, LOSS]),
            "They begin on all 2 ranks alike (mostly in the loss; on rank 0 in",
            False,
        ),
    ],
)
def test_a_device_is_suspected_where_the_same_ranks_always_begin(ranks: Others, text: str, is_device: bool) -> None:
    found = source_of(nn.Linear(1, 1), ranks).describe()
    assert found.text.startswith(text) and bool(found.text) == bool(text) and found.is_device == is_device
