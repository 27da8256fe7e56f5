"""A second derivative through a fused operation is an error with the remedy, or right: never a wrong number."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.cases import CASES, make_inputs
from tests.ops.targets import SINGLE_TARGETS, TARGETS

DTYPE = {"triton": torch.float16, "cuda": torch.bfloat16}


def second(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor | None]:
    """Of a loss that has a first-order part, too, so that torch cannot notice that the second is missing."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    loss = run(*leaves).float().sum()  # the gradient of it does not depend on the operation's result
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    penalty = sum((g.float() ** 2).sum() for g in gradients)
    return list(torch.autograd.grad(loss + penalty, leaves))


def refused(run: Callable[..., Tensor], *inputs: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*autograd kernel was not registered")
        with pytest.raises(RuntimeError, match=re.escape("use the backend reference (ops.set_backend('reference'))")):
            second(run, *inputs)


@pytest.mark.parametrize(("backend", "device"), [t for t in TARGETS if t.id != "reference"])
def test_fused_operations_refuse(backend: str, device: str) -> None:
    inputs = [t.to(device) for t in make_inputs(CASES["odd_tokens"], DTYPE.get(backend, torch.float32))]
    x, gate_up, down, weights, indices = inputs[:5]
    ops.set_backend(backend)
    order = ops.sort_slots(indices, down.shape[0], x.dtype)
    rows = ops.gather_rows(x, order)
    hidden = ops.grouped_linear(rows, gate_up, order)
    refused(lambda *a: ops.moe_mlp(*a, indices), x, gate_up, down, weights)
    main_grad = ops.MainGrad(torch.zeros(gate_up.shape, device=device), lambda: None, lambda: True)
    refused(lambda *a: ops.moe_mlp(*a, indices, (main_grad, None)), x, gate_up, down, weights)
    refused(lambda a, b: ops.grouped_linear(a, b, order), rows, gate_up)
    refused(lambda a, b: ops.grouped_linear_swiglu(a, b, order), rows, gate_up)
    refused(lambda a: ops.swiglu(a, order), hidden)
    refused(lambda a, b: ops.combine(a, order, b), rows, weights)
    scores = torch.rand(x.shape[0], down.shape[0], device=device)
    refused(lambda a: ops.router_topk(a, 2, normalize=True).weights_TK ** 2, scores)
    refused(lambda a, b: ops.route(a, b, 2)[1], x, torch.rand_like(down[:, :, 0]))


@pytest.mark.parametrize(("backend", "device"), [t for t in SINGLE_TARGETS if t.id != "reference"])
def test_gathered_rows_have_a_second_derivative(backend: str, device: str) -> None:
    """Linear, and its backward is an operation with a gradient: d/dx of sum((d/dx sum(rows**2))**2) is 8 x count**2."""
    inputs = [t.to(device) for t in make_inputs(CASES["odd_tokens"], DTYPE.get(backend, torch.float32))]
    x, indices, num_experts = inputs[0].requires_grad_(), inputs[4], inputs[2].shape[0]
    ops.set_backend(backend)
    order = ops.sort_slots(indices, num_experts, x.dtype)
    used = torch.zeros(order.slots_P.shape[0], 1, device=device)
    used[order.rows_N[order.rows_N >= 0].long()] = 1
    rows = ops.gather_rows(x, order).float() * used
    (first,) = torch.autograd.grad((rows**2).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad((first.float() ** 2).sum(), x)
    count = (indices >= 0).sum(1, keepdim=True)
    tolerance = 2e-2 if backend == "triton" else 1e-5
    torch.testing.assert_close(got.float(), 8 * x.detach().float() * count**2, rtol=tolerance, atol=0)


def test_the_reference_of_a_router_has_second_derivatives() -> None:
    """As plain autograd through the same formulas."""
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(n, 6, generator=generator).requires_grad_() for n in (7, 4)]

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logits = x @ weight.T
        return reference.router_topk(logits, 2, normalize=True).weights_TK, logits, x * 1.0

    def routed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        routing, logits, x_too = ops.route(x, weight, 2, normalize=True)
        return routing.weights_TK, logits, x_too

    ops.set_backend("reference")
    found = []
    for run in (routed, plain):
        loss = sum(t.square().sum() for t in run(*leaves))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
