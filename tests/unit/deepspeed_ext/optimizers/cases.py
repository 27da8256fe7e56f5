"""Every element-wise kernel, state dtype and gradient dtype, compared with the plain torch reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers import Shard, StepScalars, states
from deepspeed_ext.optimizers.kernels import reference
from deepspeed_ext.optimizers.kernels.options import AdamOptions, LionOptions, MomentumOptions, SGDOptions

NUMEL = 5003  # no multiple of anything: the last block of kernels and of 8-bit states is partial
UNSIGNED = frozenset({"exp_avg_sq"})
ADAM, BUFFER = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
CASES: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "adamw": ("adam", AdamOptions(1e-2, 0.9, 0.95, 1e-8, 0.1, True, False), ADAM),
    "adam_maximize": ("adam", AdamOptions(1e-2, 0.0, 0.999, 1e-6, 0.1, False, True), ADAM),
    "lion": ("lion", LionOptions(1e-2, 0.9, 0.99, 0.1, False), ("exp_avg",)),
    "sgd_nesterov": ("sgd", SGDOptions(1e-2, 0.9, 0.1, nesterov=True, decoupled_weight_decay=True), BUFFER),
    "sgd_dampened": ("sgd", SGDOptions(1e-2, 0.9, 0.1, dampening=0.1, maximize=True), BUFFER),
    "sgd_plain": ("sgd", SGDOptions(1e-2, 0.0, 0.1), ()),
    "momentum": ("momentum", MomentumOptions(0.95, True, False), BUFFER),
    "momentum_plain": ("momentum", MomentumOptions(0.95, False, True), BUFFER),
}

# (case, state dtype, gradient dtype)
GRID = list(itertools.product(CASES, ("fp32", "bf16", "int8"), (torch.float32, torch.bfloat16)))
GRID += [(case, "fp32", torch.float16) for case in CASES]


def make_shard(
    kinds: tuple[str, ...], state_dtype: str, grad_dtype: torch.dtype, device: str, numel: int = NUMEL
) -> Shard:
    """Random, with states as after some steps; the parameter has the gradient's dtype (fp32: it is the master)."""
    generator = torch.Generator().manual_seed(7)

    def normal() -> Tensor:
        return torch.randn(numel, generator=generator).to(device)

    master = normal()
    param = master if grad_dtype == torch.float32 else torch.full_like(master, torch.nan, dtype=grad_dtype)
    shard = Shard(master, normal().to(grad_dtype), param)
    for kind in kinds:
        signed = kind not in UNSIGNED
        shard.state.update(states.zeros(kind, master, states.StateDtype(state_dtype), signed=signed))
        value = normal() * torch.exp(normal())
        states.write(shard.state, kind, value if signed else value.square() + 1e-4)
    return shard


def clone(shard: Shard) -> Shard:
    """A copy; the parameter stays the master where it is."""
    master = shard.master.clone()
    param = master if shard.param is shard.master else shard.param.clone()
    return Shard(master, shard.grad.clone(), param, {key: value.clone() for key, value in shard.state.items()})


def run(module: ModuleType, case: str, shard: Shard, scalars: StepScalars) -> Tensor | None:
    """One step; the update for the "momentum" cases."""
    name, options, _ = CASES[case]
    if name != "momentum":
        getattr(module, name)(shard, options, scalars)
        return None
    update = torch.zeros_like(shard.master)
    module.momentum(shard, options, scalars, update)
    module.apply_update(shard.master, shard.param, update, 0.99, 0.1, scalars)
    return update


def mismatches(
    module: ModuleType,
    case: str,
    state_dtype: str,
    grad_dtype: torch.dtype,
    device: str,
    *,
    shares_device: bool = False,
) -> list[str]:
    """What differs from the reference after steps 1, 2 and 3, and what a skipped step changes; empty if equal."""
    bad: list[str] = []
    ours = make_shard(CASES[case][2], state_dtype, grad_dtype, device)
    expected = clone(ours)
    for step in (1, 2, 3):
        scalars = replace(StepScalars.of(ours.master.device, step, scale=0.5), shares_device=shares_device)
        run(reference, case, expected, scalars)
        run(module, case, ours, scalars)
        bad += [f"step {step}: {text}" for text in _differences(ours, expected)]
        expected = clone(ours)  # one flipped rounding must not grow
    ours.grad[0] = torch.nan
    before = clone(ours)
    run(module, case, ours, StepScalars.of(ours.master.device, 4, scale=torch.nan, skip=True))
    bad += [f"skipped: {text}" for text in _changes(ours, before)]
    return bad


def _tensors(shard: Shard) -> Iterator[tuple[str, Tensor]]:
    yield "master", shard.master
    yield "param", shard.param
    yield from shard.state.items()


def _changes(shard: Shard, before: Shard) -> list[str]:
    pairs = zip(_tensors(shard), _tensors(before), strict=True)
    return [f"{name} changed" for (name, now), (_, then) in pairs if not torch.equal(now, then)]


def _differences(ours: Shard, expected: Shard) -> list[str]:
    bad = []
    for (name, ours_n), (_, expected_n) in zip(_tensors(ours), _tensors(expected), strict=True):
        if ours_n.dtype in (torch.int8, torch.uint8):
            # The last bit of fp32 arithmetic may put a value on the other side of a rounding border, seldom.
            off = (ours_n.int() - expected_n.int()).abs()
            right = off.max() <= 1 and (off > 0).float().mean() < 5e-3
        elif name == "param" and ours_n.dtype != torch.float32:
            # Triton's interpreter truncates to bf16 where a GPU rounds to nearest.
            unit, smallest = (2**-7, 0.0) if ours_n.dtype == torch.bfloat16 else (2**-10, 2**-24)
            right = torch.allclose(ours_n.float(), ours.master, rtol=unit, atol=smallest)
            right = right and (ours_n.device.type == "cpu" or torch.equal(ours_n, ours.master.to(ours_n.dtype)))
        elif ours_n.dtype == torch.bfloat16:
            close = torch.isclose(ours_n.float(), expected_n.float(), rtol=2**-7, atol=1e-30)
            right = bool(close.all()) and (ours_n != expected_n).float().mean() < 5e-3
        else:
            right = torch.allclose(ours_n, expected_n, rtol=1e-5, atol=1e-6)
        if not right:
            bad.append(f"{name} off by up to {(ours_n.float() - expected_n.float()).abs().max().item():.3g}")
    return bad
