"""Whose gradient comes when: orders that change, gradients that come twice or not at all, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_ext
from tests.helpers import run_distributed

WIDTH, LAYERS = 24, 6
FORTH, BACK = tuple(range(LAYERS)), tuple(reversed(range(LAYERS)))
# the last to arrive is that of the first layer: always, in turn with another, or not at all; one arrives twice
CASES: dict[str, list[Sequence[int]]] = {
    "same": [FORTH] * 5,
    "turns": [FORTH, FORTH, FORTH, BACK, FORTH, BACK],
    "absent": [FORTH, FORTH, FORTH, FORTH[1:], FORTH, FORTH[2:]],
    "twice": [FORTH, FORTH, FORTH, (3, *FORTH), FORTH, (3, *FORTH), (3, *FORTH)],
    "twice in the first": [(0, 0, 3, *FORTH)] + [FORTH] * 3,
}


class Chain(nn.Module):
    """Small vectors, used in a given order; a layer used again gets a gradient of its own, as reentrant code gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = checkpoint(self._layer, x, index, use_reentrant=order.count(index) > 1)
        return x.square().mean()

    def _layer(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return torch.tanh(x * self.scales[index]) + self.scales[index]


def _input(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator).requires_grad_()


def _serial(orders: list[Sequence[int]]) -> list[torch.Tensor]:
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step, order in enumerate(orders):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(2):
                (model(_input(step, micro, rank), order) / 2).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _sharded(model: nn.Module, **options: Any) -> Any:
    assert dist.group.WORLD is not None
    return deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
        {p: n for n, p in model.named_parameters()},
        groups=deepspeed_ext.ZeroGroups(dense=dist.group.WORLD, expert={}),
        options=deepspeed_ext.ZeroOptions(**options),
    )


def _backward(model: nn.Module, optimizer: Any, rank: int, step: int, micro: int, order: Sequence[int]) -> None:
    optimizer.set_gradient_accumulation_boundary(micro == 1)
    model(_input(step, micro, rank), order).backward()
    if micro == 1 or optimizer.options.stage == 2:
        optimizer.reduce_gradients()
    optimizer.backward_epilogue()


def _distance(rank: int, orders: list[Sequence[int]], **options: Any) -> float:
    """From one process."""
    model = Chain()
    optimizer = _sharded(model, **options)
    for step, order in enumerate(orders):
        for micro in range(2):
            _backward(model, optimizer, rank, step, micro, order)
        optimizer.step()
    pairs = zip(model.parameters(), _serial(orders), strict=True)
    return max(float((a.detach() - b).abs().max() / b.abs().max()) for a, b in pairs)


def _left_early(rank: int) -> list[bool]:
    """Whether the bucket was on its way when a backward ended, in each step; the order of the fourth is another."""
    model = Chain()
    optimizer = _sharded(model)
    seen = []
    for step, order in enumerate([FORTH, FORTH, FORTH, BACK, BACK, FORTH]):
        _backward(model, optimizer, rank, step, 0, FORTH)
        optimizer.set_gradient_accumulation_boundary(True)
        model(_input(step, 1, rank), order).backward()
        seen.append(optimizer._reducer.buckets[0].is_reduced)
        optimizer.reduce_gradients()
        optimizer.step()
    return seen


def _late(rank: int) -> str:
    model = Chain()
    optimizer = _sharded(model)
    for step in range(3):
        for micro in range(2):
            _backward(model, optimizer, rank, step, micro, FORTH)
        optimizer.step()
    try:
        for step in (3, 4):  # errors are those of the step before, in which other ranks may have waited
            _backward(model, optimizer, rank, step, 1, (0, *FORTH))  # the second comes when all are there
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _after_the_reduction(rank: int) -> bool:
    """A gradient of one parameter alone, after the boundary's reduction and without the engine, still counts."""
    weights = []
    for at_once in (True, False):
        model = Chain()
        optimizer = _sharded(model)
        for step in range(3):
            optimizer.set_gradient_accumulation_boundary(True)
            loss, more = model(_input(step, 0, rank), FORTH), model.scales[4].square().sum()
            (loss + more if at_once else loss).backward()
            optimizer.reduce_gradients()
            if not at_once:
                more.backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*weights, strict=True))


def _kept_back(rank: int) -> tuple[str, bool]:
    """Stage 2: what is said of gradients that no reduction was told of, whose step is skipped."""
    model = Chain()
    optimizer = _sharded(model, stage=2, bucket_numel=512)
    some = optimizer.buckets_of([model.scales[0]])
    for only in (None, some):
        optimizer.set_gradient_accumulation_boundary(True, only=only)
        model(_input(0, 0, rank), FORTH).backward()
        optimizer.reduce_gradients()
        if only is None:
            optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    skipped = all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    try:
        optimizer.step()
        error = "no error"
    except RuntimeError as raised:
        error = str(raised)
    return error, skipped and len(some) < len(optimizer._reducer.buckets)


def _scenarios(rank: int, world: int) -> dict[str, Any]:
    return {
        "distances": {
            (case, stage, overlap): _distance(rank, orders, stage=stage, overlap_comm=overlap)
            for case, orders in CASES.items()
            for stage in (1, 2)
            for overlap in ["twice" not in case]
        },
        "early": _left_early(rank),
        "late": _late(rank),
        "after": _after_the_reduction(rank),
        "kept back": _kept_back(rank),
    }


def test_gradient_order() -> None:
    for result in run_distributed(_scenarios, 2):
        assert {case: found for case, found in result["distances"].items() if not found < 2e-6} == {}
        assert result["early"] == [True] * 6, "in whatever order the gradients arrive"
        assert "'scales.0' got gradient number 2 of one backward after its bucket had been" in result["late"]
        assert result["after"]
        error, skipped = result["kept back"]
        assert "got a gradient in a backward that was said not to reach it" in error and skipped
