"""A stack of layers under the sharded optimizer, and under torch's in one process, for deepspeed_ext/zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext

WIDTH = 40
UNIT = 2 * 256  # the smallest bucket of two ranks


class Stack(nn.Module):
    """Layers of WIDTH x WIDTH; ``side`` is used on some ranks only, ``bare`` by its parent without being called."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.side = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.bare = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor, use_side: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if use_side:
            x = x + self.side(x)
        return (x @ self.bare.weight).square().mean()


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    assert dist.group.WORLD is not None
    return deepspeed_ext.EPZeroOptimizer(
        optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
        {p: n for n, p in model.named_parameters()},
        groups=deepspeed_ext.ZeroGroups(dense=dist.group.WORLD, expert={}),
        options=deepspeed_ext.ZeroOptions(**{"bucket_numel": UNIT, **options}),
        module=model,
    )


def input_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def take_step(model: nn.Module, optimizer: Any, step: int, rank: int, **arguments: Any) -> None:
    optimizer.set_gradient_accumulation_boundary(True)
    model(input_of(step, rank), **arguments).backward()
    optimizer.reduce_gradients()
    optimizer.backward_epilogue()
    optimizer.step()


def serial(steps: int, use_side: Callable[[int, int], bool]) -> dict[str, torch.Tensor]:
    """torch's AdamW on both ranks' batches; what got no gradient has a zero one."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        sum((model(input_of(step, r), use_side(step, r)) for r in range(2)), start=torch.zeros(())).div(2).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def distance(model: nn.Module, expected: dict[str, torch.Tensor]) -> float:
    return max(
        float((p.detach() - expected[n]).abs().max() / expected[n].abs().max()) for n, p in model.named_parameters()
    )
