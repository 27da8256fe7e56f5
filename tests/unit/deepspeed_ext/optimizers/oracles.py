"""Runs an optimizer against a well-kept implementation: the weights after ten steps, alone and on shards of any cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.optimizers import Shard, StepScalars, own_optimizer, shard_optimizer_for
from deepspeed_ext.optimizers.base import CurvatureOptimizer
from deepspeed_ext.optimizers.whole_tensors import TensorOptimizer, WholeTensors, run_in_rounds, tensors_of

SHAPES = {"matrix": (12, 20), "vector": (7,), "wide": (3, 50)}
STEPS, LR, DECAY = 10, 1e-2, 0.1
B2, B3 = (0.9, 0.95), (0.9, 0.95, 0.999)
FEWER_BITS = pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.05), ("int8", 0.3)])
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    """Large ones in some steps, so that what clips them shows."""
    generator = torch.Generator().manual_seed(100 + step)
    scale = 3.0 if step % 3 == 2 else 0.1
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def expected(make: Make) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What gradients are taken at, and what is evaluated, which differ for schedule-free ones."""
    params = {name: nn.Parameter(value.clone()) for name, value in initial().items()}
    optimizer: Any = make(list(params.values()))
    has_modes = hasattr(optimizer, "eval")
    if has_modes:
        optimizer.train()
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient.clone()
        optimizer.step()
    trained = {name: param.detach().clone() for name, param in params.items()}
    if has_modes:
        optimizer.eval()
    return trained, {name: param.detach().clone() for name, param in params.items()}


class Cut:
    """All parameters one after the other, with padding between, in shards of ``length``, as a flat buffer has them."""

    def __init__(self, optimizer: torch.optim.Optimizer, length: int, dtype: torch.dtype) -> None:
        self.group = optimizer.param_groups[0]
        self.optimizer = shard_optimizer_for(optimizer, self.group)
        self.places, end = {}, 0
        for name, shape in SHAPES.items():
            self.places[name] = slice(end, end + torch.Size(shape).numel())
            end += torch.Size(shape).numel() + 9
        self.flat = torch.zeros(-(-end // length) * length)
        for name, value in initial().items():
            self.flat[self.places[name]] = value.flatten()
        self.shards = [
            Shard(part.clone(), torch.empty(0), part.to(dtype, copy=True)) for part in self.flat.split(length)
        ]
        for shard in self.shards:
            shard.state = self.optimizer.new_state(shard, self.group)
        self.length = length
        whole = [tensor for name, shape in SHAPES.items() for tensor in tensors_of(name, shape)]
        ranges = [list(self._ranges(index * length)) for index in range(len(self.shards))]
        self.tensors = WholeTensors(whole, ranges, torch.device("cpu"))
        if isinstance(self.optimizer, TensorOptimizer):
            self.tensors.state = self.optimizer.new_tensor_state(self.tensors, self.group)

    def _ranges(self, low: int) -> Any:
        for name, place in self.places.items():
            start, stop = max(place.start, low), min(place.stop, low + self.length)
            if start < stop:
                yield name, start - place.start, stop - place.start, start - low

    def _take(self, grads: dict[str, Tensor], number: int, skip: bool) -> StepScalars:
        flat = torch.zeros_like(self.flat)
        for name, gradient in grads.items():
            flat[self.places[name]] = gradient.flatten() * 4
        for shard, part in zip(self.shards, flat.split(self.length), strict=True):
            shard.grad = part.clone()
        return StepScalars.of(torch.device("cpu"), number, 0.25, skip)

    def estimate(self, grads: dict[str, Tensor], num_labels: float, *, skip: bool = False) -> None:
        scalars = self._take(grads, 1, skip)
        for shard in self.shards:
            assert isinstance(self.optimizer, CurvatureOptimizer)
            self.optimizer.update_curvature_(shard, self.group, scalars, torch.tensor(num_labels))

    def step(self, number: int, grads: dict[str, Tensor], *, skip: bool = False) -> None:
        scalars = self._take(grads, number, skip)
        if isinstance(self.optimizer, TensorOptimizer):
            run_in_rounds([(self.optimizer.update_tensors_(self.shards, self.tensors, self.group, scalars), ())])
            return
        for shard in self.shards:
            self.optimizer.update_(shard, self.group, scalars)

    def of(self, which: str) -> dict[str, Tensor]:
        flat = torch.cat([getattr(shard, which) for shard in self.shards])
        named = {name: flat[place].view(SHAPES[name]).clone() for name, place in self.places.items()}
        for place in self.places.values():
            flat[place] = 0
        assert not flat.any(), "padding stays zero"
        return named


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        moved = (value - start[name]).abs().max()
        assert (actual[name] - value).abs().max() <= 2e-5 * moved, name


def check_against_oracle(name: str, make: Make, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our weights after ten steps, alone and on shards, are those of the other implementation."""
    trained, evaluated = expected(make)
    params = {key: nn.Parameter(value.clone()) for key, value in initial().items()}
    options = {"lr": LR, "weight_decay": DECAY} | options
    ours = own_optimizer(name)(params.values(), **options)
    monkeypatch.setattr("deepspeed_ext.optimizers.blocks.CPU_BLOCK", 256)
    cut = Cut(own_optimizer(name)([torch.zeros(1)], **options), 300, torch.float32)
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            params[key].grad = gradient.clone()
        ours.step()
        cut.step(step + 1, {key: value * torch.nan for key, value in gradients(step).items()}, skip=True)
        cut.step(step + 1, gradients(step))
    assert_close({key: param.detach() for key, param in params.items()}, trained, initial())
    assert_close(cut.of("param"), trained, initial())
    assert_close(cut.of("master"), evaluated, initial())


def check_fewer_bits(name: str, dtype: str, tolerance: float) -> None:
    """States in fewer bits stay near those in fp32, and a skipped step changes none."""
    exact = Cut(own_optimizer(name)([torch.zeros(1)], lr=LR), 512, torch.bfloat16)
    rounded = Cut(own_optimizer(name)([torch.zeros(1)], lr=LR, state_dtype=dtype), 512, torch.bfloat16)
    for step in range(STEPS):
        for cut in (exact, rounded):
            if step == 0 and name == "sophia":
                cut.estimate(gradients(50), 32.0)
            cut.step(step + 1, gradients(step))
    wanted, found, start = exact.of("master"), rounded.of("master"), initial()
    for key, value in wanted.items():
        moved = (value - start[key]).norm()
        assert 0 < (found[key] - value).norm() <= tolerance * moved, key
    assert all(torch.equal(shard.param, shard.master.bfloat16()) for shard in rounded.shards)
    before = [[t.clone() for t in (s.master, s.param, *s.state.values())] for s in rounded.shards]
    rounded.step(STEPS + 1, {key: value * torch.nan for key, value in gradients(0).items()}, skip=True)
    after = [[s.master, s.param, *s.state.values()] for s in rounded.shards]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
