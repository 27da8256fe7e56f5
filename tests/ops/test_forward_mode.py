"""Forward-mode AD through a fused operation is an error with the remedy, never a zero; the reference has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.cases import Case, make_inputs
from tests.ops.targets import SINGLE_TARGETS, TARGETS

Run = Callable[[Tensor], Tensor]
DTYPE = {"triton": torch.float16, "cuda": torch.bfloat16}
REMEDY = "use the backend reference (ops.set_backend('reference')) without main gradients"


def calls(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> Iterator[tuple[str, Run, Tensor]]:
    """Name, function and argument of every operation that has kernels on the backend set."""
    order = ops.sort_slots(indices, down.shape[0], x.dtype)
    rows = ops.gather_rows(x, order)
    hidden = ops.grouped_linear(rows, gate_up, order)
    main_grad = ops.MainGrad(torch.zeros(gate_up.shape, device=x.device), lambda: None)
    yield "moe_mlp", lambda a: ops.moe_mlp(a, gate_up, down, weights, indices), x
    yield "moe_mlp", lambda a: ops.moe_mlp(x, gate_up, a, weights, indices), down
    yield "moe_mlp", lambda a: ops.moe_mlp(x, gate_up, down, a, indices), weights
    yield "moe_mlp", lambda a: ops.moe_mlp(a, gate_up, down, weights, indices, (main_grad, None)), x
    yield "gather_rows", lambda a: ops.gather_rows(a, order), x
    yield "combine", lambda a: ops.combine(rows, order, a), weights
    yield "swiglu", lambda a: ops.swiglu(a, order), hidden
    yield "grouped_linear", lambda a: ops.grouped_linear(rows, a, order), gate_up
    yield "grouped_linear_swiglu", lambda a: ops.grouped_linear_swiglu(a, gate_up, order), rows
    yield "grouped_input_gradient", lambda a: ops.grouped_input_gradient(a, gate_up, order), hidden
    yield "grouped_weight_gradient", lambda a: ops.grouped_weight_gradient(hidden, a, order), rows
    yield "router_topk", lambda a: ops.router_topk(a, 2).weights_TK, torch.rand(12, 3, device=x.device)
    yield "route", lambda a: ops.route(a, down[:, :, 0], 2)[1], x
    if ops.get_backend() != "sycl":  # whose copies, as all but sums on the CPU, are plain PyTorch
        positions = torch.arange(24, dtype=torch.int32, device=x.device).view(12, 2)
        yield "sum_copies", lambda a: ops.sum_copies(a, positions), torch.cat((x, x))
    if ops.get_backend() in DTYPE:
        table = torch.rand(4, 8, device=x.device)
        yield "copy_rows", lambda a: ops.copy_rows(a, positions, 24), x
        yield "rotate", lambda a: ops.rotate(a, table, table), torch.rand(2, 3, 4, 8, device=x.device)
        yield "silu_mul", lambda a: ops.silu_mul(a, x), x
        yield "log_sum_exp", ops.log_sum_exp, x


def by_jvp(run: Run, a: Tensor) -> Tensor:
    return torch.func.jvp(run, (a,), (torch.ones_like(a),))[1]


def by_dual_numbers(run: Run, a: Tensor) -> Tensor:
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(a, torch.ones_like(a)))).tangent


def by_hessian(run: Run, a: Tensor) -> Tensor:
    """Forward over reverse: functorch hides the tangent below its other transform."""
    return torch.func.hessian(lambda b: run(b).float().square().sum())(a)


def by_linearize(run: Run, a: Tensor) -> Tensor:
    return torch.func.linearize(run, a)[1](torch.ones_like(a))


@pytest.mark.parametrize("derive", [by_jvp, by_dual_numbers, by_hessian, by_linearize, torch.func.jacfwd])
@pytest.mark.parametrize(("backend", "device"), [t for t in TARGETS if t.id != "reference"])
def test_fused_operations_refuse(backend: str, device: str, derive: Callable[..., Tensor]) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(Case(12, 16, 8, 3, 2), DTYPE.get(backend, torch.float32), device)
    for name, run, argument in calls(*inputs[:5]):
        run(argument)
        message = f"{name} has no forward-mode derivative: .*{re.escape(REMEDY)}"
        with pytest.raises(RuntimeError, match=message):
            derive(run, argument) if derive is not torch.func.jacfwd else torch.func.jacfwd(run)(argument)


@pytest.mark.parametrize(("backend", "device"), [t for t in TARGETS if t.id != "reference"])
def test_so_does_a_backward_whose_gradient_has_a_tangent(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(Case(12, 16, 8, 3, 2), DTYPE.get(backend, torch.float32), device)
    for name, run, argument in calls(*inputs[:5]):
        leaf = argument.detach().clone().requires_grad_()
        y = run(leaf)
        if name == "log_sum_exp" or name.endswith("_gradient") or (backend, name) == ("cpu", "sum_copies"):
            continue  # no gradient of its own, or one in plain PyTorch
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"no forward-mode.*{re.escape(REMEDY)}"):
            torch.autograd.grad(y, leaf, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize(("backend", "device"), [t for t in SINGLE_TARGETS if t.id != "reference"])
def test_what_has_no_tangent_runs_beside_what_has(backend: str, device: str) -> None:
    ops.set_backend(backend)
    x, gate_up, down, weights, indices, _ = make_inputs(
        Case(12, 16, 8, 3, 2), DTYPE.get(backend, torch.float32), device
    )
    y = ops.moe_mlp(x, gate_up, down, weights, indices)

    def scaled(scale: Tensor) -> Tensor:
        return scale * ops.moe_mlp(x, gate_up, down, weights, indices)

    one = torch.ones((), dtype=x.dtype, device=device)
    for derive in (by_jvp, by_dual_numbers):
        torch.testing.assert_close(derive(scaled, one), y, rtol=0, atol=0)


def test_the_reference_has_forward_mode_derivatives() -> None:
    """Of what is an autograd.Function there, too: against the reverse mode."""
    ops.set_backend("reference")
    x, gate_up, down, weights, indices, _ = make_inputs(Case(12, 16, 8, 3, 2), torch.float64)
    weights, positions = weights.double(), torch.arange(24, dtype=torch.int32).view(12, 2)
    order = ops.sort_slots(indices, 3, x.dtype)
    for run, argument in (
        (lambda a: reference.moe_mlp(a, gate_up, down, weights, indices), x),
        (lambda a: ops.combine(ops.grouped_linear(ops.gather_rows(a, order), gate_up, order), order, weights), x),
        (lambda a: ops.route(a, down[:, :, 0], 2)[0].weights_TK, x),
        (lambda a: ops.route(x, a, 2)[1], down[:, :, 0]),
        (lambda a: ops.copy_rows(a, positions, 24), x),
        (lambda a: ops.sum_copies(a, positions), torch.cat((x, x))),
    ):
        leaf, dy = argument.clone().requires_grad_(), torch.ones_like(run(argument))
        (gradient,) = torch.autograd.grad(run(leaf), leaf, dy)
        tangent = torch.randn_like(argument)
        found = torch.func.jvp(run, (argument,), (tangent,))[1]
        torch.testing.assert_close((found * dy).sum(), (gradient * tangent).sum())
