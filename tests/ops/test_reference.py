"""The specification itself: in fp64 by finite differences, and finite where scores underflow."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.cases import (
    CASES,
    Case,
    expected,
    make_inputs,
    mismatches,
    values_and_gradients,
)
from tests.ops.test_router import OPTIONS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_reference_of_scores_that_underflow_is_finite_in_every_dtype(dtype: torch.dtype) -> None:
    """In its second derivatives, too."""
    logits = torch.full((2, 6), -200.0, dtype=dtype, requires_grad=True)
    weights = reference.router_topk(logits, 3, sigmoid=True, normalize=True).weights_TK
    assert weights.dtype == dtype and weights.double().max() < 1e-15
    (first,) = torch.autograd.grad(weights.sum() + weights.square().sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), logits)
    assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_by_finite_differences(options: tuple[bool, bool, bool]) -> None:
    sigmoid, normalize, biased = options
    generator = torch.Generator().manual_seed(5)
    leaves = [torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (3, 5)]
    bias = torch.randn(5, generator=generator, dtype=torch.float64) if biased else None

    def outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing, logits, x = ops.route(*leaves, 2, sigmoid=sigmoid, normalize=normalize, selection_bias_E=bias)
        return routing.weights_TK, routing.scores_TE, logits, x

    ops.set_backend("reference")
    assert torch.autograd.gradcheck(outputs, leaves)


def test_the_reference_is_exact_in_fp64() -> None:
    """What other tests compare with is itself held against the token-by-token computation."""
    for name, case in CASES.items():
        inputs = [t.double() if t.is_floating_point() else t for t in make_inputs(case, torch.float32)]
        got = values_and_gradients(reference.moe_mlp, inputs)
        assert not mismatches(got, expected(inputs), 1e-12), name


def test_reference_gradients_by_finite_differences() -> None:
    inputs = make_inputs(Case(5, 4, 3, 3, 2, "some_foreign"), torch.float64, seed=3)
    leaves = [t.double().requires_grad_() for t in inputs[:4]]
    assert torch.autograd.gradcheck(lambda *tensors: reference.moe_mlp(*tensors, inputs[4]), leaves)
