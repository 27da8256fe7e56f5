"""Inputs and comparison shared by the tests of every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("y", "dx", "dgate_up", "ddown", "dweights")
# Largest ||out - ref|| / ||ref|| when inputs are rounded to the dtype and sums run in fp32: a few roundings per value.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    tokens: int
    width: int
    inner: int
    experts: int
    topk: int
    routing: str = "random"  # random | one_expert | none_local | some_foreign | half_empty | all_experts


CASES = {
    "no_token": Case(0, 16, 8, 4, 2),
    "one_token": Case(1, 16, 8, 4, 2),
    "one_of_two": Case(3, 19, 13, 2, 1, "one_expert"),  # odd widths, an empty expert; cheap to interpret
    "odd_tokens": Case(131, 32, 24, 4, 2),
    "odd_widths": Case(37, 19, 13, 5, 3),
    "wide": Case(300, 80, 72, 3, 2),
    "one_expert_exists": Case(33, 16, 24, 1, 1),
    "all_to_one": Case(70, 24, 16, 6, 1, "one_expert"),
    "every_expert": Case(29, 16, 16, 4, 4, "all_experts"),
    "empty_experts": Case(64, 16, 16, 8, 2, "half_empty"),
    "none_local": Case(20, 16, 16, 4, 2, "none_local"),
    "some_foreign": Case(90, 32, 16, 4, 3, "some_foreign"),
}


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """x, gate_up, down, weights, indices and the gradient of y."""
    g = torch.Generator().manual_seed(seed)
    T, D, F, E, K = case.tokens, case.width, case.inner, case.experts, case.topk
    indices = torch.rand(T, E, generator=g).topk(K, dim=-1).indices
    if case.routing == "one_expert":
        indices = torch.full((T, K), E - 2)
    elif case.routing == "half_empty":
        indices = 2 * torch.rand(T, E // 2, generator=g).topk(K, dim=-1).indices
    elif case.routing == "none_local":
        indices = torch.full((T, K), -1)
    elif case.routing == "some_foreign":
        indices = torch.where(torch.rand(T, K, generator=g) < 0.6, -1, indices)
    float_inputs = [
        torch.randn(T, D, generator=g),
        torch.randn(E, 2 * F, D, generator=g) / D**0.5,
        torch.randn(E, D, F, generator=g) / F**0.5,
    ]
    weights = torch.rand(T, K, generator=g)
    dy = torch.randn(T, D, generator=g)
    tensors = [*(t.to(dtype) for t in float_inputs), weights, indices, dy.to(dtype)]
    return [t.to(device) for t in tensors]


MUTATIONS = ("drop_slot", "zero_weight", "swap_experts")


def mutated(inputs: list[Tensor], mutation: str) -> list[Tensor]:
    """A copy of ``make_inputs`` with one slot of token 17 changed, as a kernel with a mistake would see it."""
    x, gate_up, down, weights, indices, dy = (t.clone() for t in inputs)
    if mutation == "drop_slot":
        indices[17, 1] = -1
    elif mutation == "zero_weight":
        weights[17, 1] = 0.0
    else:
        indices[17] = indices[17].flip(0)
    return [x, gate_up, down, weights, indices, dy]


def values_and_gradients(fn: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    *arguments, dy = inputs
    leaves = [t.detach().clone().requires_grad_() for t in arguments[:4]]
    y = fn(*leaves, arguments[4])
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def expected(inputs: list[Tensor]) -> dict[str, Tensor]:
    """The specification in fp64 on the same (already rounded) inputs."""
    wide = [t.double().cpu() if t.is_floating_point() else t.cpu() for t in inputs]
    return values_and_gradients(_reference_fp64, wide)


@functools.cache
def case_with_answer(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Inputs of CASES[name], which nobody may change, and ``expected`` of them: token by token it takes seconds."""
    inputs = make_inputs(CASES[name], dtype)
    return inputs, expected(inputs)


def _reference_fp64(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Written out token by token: shares no code with what it checks, and stays in fp64."""
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(indices.shape[1]):
            e = int(indices[t, k])
            if e < 0:
                continue
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            row = weights[t, k] * (down[e] @ (torch.nn.functional.silu(gate) * up))
            y = y + torch.nn.functional.pad(row[None], (0, 0, t, x.shape[0] - t - 1))
    return y + 0.0 * (x.sum() + gate_up.sum() + down.sum() + weights.sum())


def mismatches(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> list[str]:
    """Names of values or gradients that differ by more than the tolerance, or hold NaN."""
    bad = []
    for name, reference_value in want.items():
        value = got[name].double().cpu()
        scale = reference_value.norm() or torch.ones(())
        error = (value - reference_value.double()).norm() / scale
        if not error <= tolerance:
            bad.append(f"{name}: {error:.2e} > {tolerance:.0e}")
    return bad


__all__ = [
    "CASES",
    "MUTATIONS",
    "NAMES",
    "TOLERANCE",
    "Case",
    "case_with_answer",
    "expected",
    "make_inputs",
    "mismatches",
    "mutated",
    "values_and_gradients",
]
