"""Forwards that wait for parameters, in every order that users call modules in; test_param_all_gather.py runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import deepspeed_ext

WIDTH = 40
NUMEL = 4 * 5 * 256  # of a bucket: 2.5 layers


class _Layer(nn.Linear):
    """Notes when it computes with parameters that nobody has waited for. ``late``: shared by all."""

    def __init__(self, late: list[str], name: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.late, self.name = late, name
        self.is_here: Callable[[], bool] = lambda: True
        self.register_forward_pre_hook(_Layer.check)  # as weight_norm's, which computes a weight

    def check(self, args: object = None) -> None:
        if not self.is_here():
            self.late.append(self.name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        return torch.tanh(super().forward(x))


class _Model(nn.Module):
    """Layers in the order that the call asks for, in pairs that are modules themselves."""

    def __init__(self, late: list[str]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.pairs = nn.ModuleList(nn.Sequential(_Layer(late, f"{i}a"), _Layer(late, f"{i}b")) for i in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = self.pairs[index](x)
        return x


class _Other(nn.Module):
    """A module around one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class _Run:
    """A model whose layers note when they compute too early, and its optimizer."""

    def __init__(self, rank: int, shard: Callable[..., Any]) -> None:
        self.late: list[str] = []
        self.model = _Model(self.late)
        self.optimizer = shard(self.model, overlap_param_gather=True, bucket_numel=NUMEL)
        self.layers: list[Any] = [layer for pair in self.model.pairs for layer in pair]  # type: ignore[union-attr]
        for layer in self.layers:
            buckets = self.optimizer.buckets_of(layer.parameters())
            layer.is_here = lambda buckets=buckets: not any(bucket.is_gathering for bucket in buckets)
        self.x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.model(self.x, (0, 1, 2)).square().mean().backward()
        self.optimizer.reduce_gradients()
        self.optimizer.step()

    def hooked(self) -> int:
        return sum(len(layer._forward_pre_hooks) - 1 for layer in self.layers)

    def pending(self) -> int:
        return sum(bucket.is_gathering for bucket in self.optimizer._reducer.buckets)


def waits(rank: int, shard: Callable[..., Any]) -> dict[str, Any]:
    """What each way of calling left to be desired. ``shard``: model and options -> EPZeroOptimizer."""
    run = _Run(rank, shard)
    model, layers, x, late = run.model, run.layers, run.x, run.late
    found: dict[str, Any] = {}
    run.step()
    run.step()
    found["in order"] = run.hooked(), late.copy()
    model(x, (0,))
    between = run.hooked(), run.pending()
    model(x, (0, 1, 2))
    found["after forward"] = between, run.hooked(), late.copy()
    for name, call in {
        "reversed": lambda: model(x, (2, 1, 0)),
        "skipped": lambda: [model(x, (1,)), model(x, (2,))],
        "twice": lambda: model(x, (1, 1, 0, 1)),
        "directly": lambda: layers[3](x),
        "by another": lambda: _Other(layers[1])(x),
        "second of a pair": lambda: [layers[5](x), layers[1](x)],
    }.items():
        late.clear()
        run.step()
        began = run.pending()
        call()
        found[name] = began > 1, late.copy()
    return found | _ends(run)


def _ends(run: _Run) -> dict[str, Any]:
    """Copies, state dicts, loading and destroying, while parameters are on their way."""
    model, layers, x = run.model, run.layers, run.x
    found: dict[str, Any] = {}
    run.step()
    twin = copy.deepcopy(model)  # such as an average of the weights
    found["copied"] = twin(x, (0, 1, 2)).shape == x.shape and sum(p.numel() for p in twin.parameters()) == 6 * 1640
    run.step()
    layers[2].state_dict()
    found["state dict of a part"] = run.pending()
    run.step()
    wanted = {name: torch.full_like(value, 0.5) for name, value in layers[4].state_dict().items()}
    run.step()
    layers[4].load_state_dict(wanted)
    model(x, (0, 1, 2))
    found["loaded"] = layers[4].weight.min().item(), layers[4].bias.max().item()
    run.optimizer.destroy()
    found["destroyed"] = run.hooked() + sum(len(m._state_dict_pre_hooks) for m in model.modules())
    return found


def compiled(rank: int) -> dict[str, Any]:
    """For each way to compile a model: buckets on their way after steps and after forwards, and the last outputs."""
    found: dict[str, Any] = {}
    for style in ("not", "wrapped", "in place", "its parts", "the engine"):
        torch.manual_seed(4)
        model: Any = nn.Sequential(*(_Other(nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
        if style == "wrapped":
            model = torch.compile(model, backend="eager", fullgraph=True)
        if style == "in place":  # DeepSpeed's own hooks are in it, which torch cannot compile
            model.compile(backend="eager")
        for part in model if style == "its parts" else ():
            part.compile(backend="eager", fullgraph=True)
        engine, *_ = deepspeed_ext.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 1, "reduce_bucket_size": NUMEL},
                "deepspeed_ext": {"overlap_param_gather": True},
            },
        )
        if style == "the engine":
            engine.compile(backend="eager")
        pending: dict[str, list[int]] = {"after steps": [], "after forwards": []}
        for step in range(4):
            output = engine(torch.full((2, WIDTH), 0.1 * (step + rank)))
            pending["after forwards"].append(sum(b.is_gathering for b in engine.optimizer._reducer.buckets))
            engine.backward(output.square().mean())
            engine.step()
            pending["after steps"].append(sum(b.is_gathering for b in engine.optimizer._reducer.buckets))
        found[style] = pending["after steps"], pending["after forwards"], output.detach()
        engine.destroy()
    found["cut by"] = str(dict(counters["graph_break"]))
    return found
