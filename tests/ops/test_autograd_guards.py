"""What fused operations refuse of autograd, and what they do with tensors that hold no values.

A second derivative or a forward-mode derivative through one is an error with the remedy: never a wrong number.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.cases import Case, make_inputs, values_and_gradients
from tests.ops.sycl_device import needs_sycl
from tests.ops.targets import ROUTER_TARGETS, TARGETS

DTYPE = {"triton": torch.float16, "cuda": torch.bfloat16}
CASE = Case(12, 16, 8, 3, 2)

# Second derivatives


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
def test_second_derivatives_are_refused(backend: str, device: str) -> None:
    x, gate_up, down, weights, indices, _ = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    ops.set_backend(backend)
    refused(lambda *a: ops.moe_mlp(*a, indices), x, gate_up, down, weights)
    main_grad = ops.MainGrad(torch.zeros(gate_up.shape, device=device), lambda: None, lambda: True)
    refused(lambda *a: ops.moe_mlp(*a, indices, (main_grad, None)), x, gate_up, down, weights)
    refused(lambda a, b: ops.route(a, b, 2)[1], x, torch.rand_like(down[:, :, 0]))
    refused(lambda a, b: ops.route(a, b, 2, normalize=True)[0].weights_TK ** 2, x, torch.rand_like(down[:, :, 0]))


def test_the_reference_of_a_router_has_second_derivatives() -> None:
    """As plain autograd through the same formulas."""
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(n, 6, generator=generator).requires_grad_() for n in (7, 4)]

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logits = x @ weight.T
        return reference.router_topk(logits, 2, normalize=True).weights_TK, logits, x * 1.0

    def routed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        routing, logits, x_out = ops.route(x, weight, 2, normalize=True)
        return routing.weights_TK, logits, x_out

    ops.set_backend("reference")
    found = []
    for run in (routed, plain):
        loss = sum(t.square().sum() for t in run(*leaves))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# Forward-mode derivatives

Run = Callable[[Tensor], Tensor]
REMEDY = "use the backend reference (ops.set_backend('reference')) without main gradients"


def calls(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor
) -> Iterator[tuple[str, Run, Tensor]]:
    """Name, function and argument of every operation that has kernels on the backend set."""
    main_grad = ops.MainGrad(torch.zeros(gate_up.shape, device=x.device), lambda: None)
    yield "moe_mlp", lambda a: ops.moe_mlp(a, gate_up, down, weights, indices), x
    yield "moe_mlp", lambda a: ops.moe_mlp(x, gate_up, a, weights, indices), down
    yield "moe_mlp", lambda a: ops.moe_mlp(x, gate_up, down, a, indices), weights
    yield "moe_mlp", lambda a: ops.moe_mlp(a, gate_up, down, weights, indices, (main_grad, None)), x
    yield "route", lambda a: ops.route(a, down[:, :, 0], 2)[1], x
    yield "route", lambda a: ops.route(x, a, 2)[0].weights_TK, down[:, :, 0]
    if ops.get_backend() != "sycl":  # whose copies, as all but sums on the CPU, are plain PyTorch
        positions = torch.arange(24, dtype=torch.int32, device=x.device).view(12, 2)
        yield "sum_copies", lambda a: ops.sum_copies(a, positions), torch.cat((x, x))
    if ops.get_backend() in DTYPE:
        table = torch.rand(4, 8, device=x.device)
        yield "copy_rows", lambda a: ops.copy_rows(a, positions, 24), x
        yield "rotate", lambda a: ops.rotate(a, table, table), torch.rand(2, 3, 4, 8, device=x.device)
        yield "rms_norm", lambda a: ops.rms_norm(a, x[0], 1e-5), x
        yield "add_rms_norm", lambda a: ops.add_rms_norm(x, a, x[0], 1e-5)[1], x
        heads = torch.rand(2, 4, 3, 8, device=x.device)
        yield "norm_rotate", lambda a: ops.norm_rotate(a, table[0], 1e-5, table, table), heads
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
def test_forward_mode_is_refused(backend: str, device: str, derive: Callable[..., Tensor]) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    for name, run, argument in calls(*inputs[:5]):
        run(argument)
        message = f"{name} has no forward-mode derivative: .*{re.escape(REMEDY)}"
        with pytest.raises(RuntimeError, match=message):
            derive(run, argument) if derive is not torch.func.jacfwd else torch.func.jacfwd(run)(argument)


@pytest.mark.parametrize(("backend", "device"), [t for t in TARGETS if t.id != "reference"])
def test_a_gradient_with_a_tangent_is_refused(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    for name, run, argument in calls(*inputs[:5]):
        leaf = argument.detach().clone().requires_grad_()
        y = run(leaf)
        if name == "log_sum_exp" or (backend, name) == ("cpu", "sum_copies"):
            continue  # no gradient of its own, or one in plain PyTorch
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"no forward-mode.*{re.escape(REMEDY)}"):
            torch.autograd.grad(y, leaf, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize(("backend", "device"), [t for t in ROUTER_TARGETS if t.id != "reference"])
def test_what_has_no_tangent_runs_beside_what_has(backend: str, device: str) -> None:
    ops.set_backend(backend)
    x, gate_up, down, weights, indices, _ = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    y = ops.moe_mlp(x, gate_up, down, weights, indices)

    def scaled(scale: Tensor) -> Tensor:
        return scale * ops.moe_mlp(x, gate_up, down, weights, indices)

    one = torch.ones((), dtype=x.dtype, device=device)
    for derive in (by_jvp, by_dual_numbers):
        torch.testing.assert_close(derive(scaled, one), y, rtol=0, atol=0)


def test_the_reference_has_forward_mode_derivatives() -> None:
    """Of what is an autograd.Function there, too: against the reverse mode."""
    ops.set_backend("reference")
    x, gate_up, down, weights, indices, _ = make_inputs(CASE, torch.float64)
    weights, positions = weights.double(), torch.arange(24, dtype=torch.int32).view(12, 2)
    for run, argument in (
        (lambda a: reference.moe_mlp(a, gate_up, down, weights, indices), x),
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


# Tensors without values


def same_kind(got: Tensor | None, want: Tensor) -> None:
    assert got is not None and type(got) is type(want)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


def run_all(inputs: list[Tensor]) -> dict[str, Tensor]:
    """Every operation with its gradients once; their results."""
    x, gate_up, down, weights, indices = inputs[:5]
    found: dict[str, Tensor] = {}

    def keep(name: str, run: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        leaves = [t.detach().requires_grad_() for t in arguments]
        y = found[name] = run(*leaves)
        for gradient, leaf in zip(torch.autograd.grad(y, leaves, torch.ones_like(y)), leaves, strict=True):
            same_kind(gradient, leaf.detach())
        return y.detach()

    keep("moe_mlp", lambda *a: ops.moe_mlp(*a, indices), x, gate_up, down, weights)
    positions = torch.arange(24, dtype=torch.int32, device=x.device).view(12, 2)
    keep("copy_rows", lambda a: ops.copy_rows(a, positions, 24), x)
    keep("sum_copies", lambda a: ops.sum_copies(a, positions), torch.cat((x, x)))
    keep("route", lambda a, b: ops.route(a, b, 2)[1], x, down[:, :, 0])
    found["expert_counts"] = ops.expert_counts(indices, CASE.experts)
    table = torch.ones(4, 8, device=x.device)
    keep("rotate", lambda a: ops.rotate(a, table, table), x.new_ones(2, 3, 4, 8))
    keep("rms_norm", lambda a: ops.rms_norm(a, x[0], 1e-5), x)
    keep("add_rms_norm", lambda a, b: ops.add_rms_norm(a, b, x[0], 1e-5)[1], x, x)
    keep("norm_rotate", lambda a: ops.norm_rotate(a, table[0], 1e-5, table, table), x.new_ones(2, 4, 3, 8))
    keep("silu_mul", ops.silu_mul, x, x)
    found["log_sum_exp"] = ops.log_sum_exp(x)
    return found


def run_with_main_grads(inputs: list[Tensor]) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs[:4]]
    told: list[Tensor] = []
    buffers = [torch.zeros(t.shape, device=t.device) for t in leaves[1:3]]
    main_grads = (ops.MainGrad(buffers[0], lambda: None), ops.MainGrad(buffers[1], lambda: None))
    y = ops.moe_mlp(*leaves, inputs[4], main_grads, lambda dx, dweights: told.extend((dx, dweights)))
    y.backward(torch.ones_like(y))
    assert leaves[1].grad is None and leaves[2].grad is None
    for gradient, place in zip((leaves[0].grad, leaves[3].grad, *told), (0, 3, 0, 3), strict=True):
        same_kind(gradient, leaves[place].detach())


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_fake_tensors(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    want = run_all(inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        got = run_all(fakes)
    for name, value in want.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name


@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_fake_tensors_with_main_gradients(backend: str, device: str) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASE, DTYPE.get(backend, torch.float32), device)
    with FakeTensorMode() as mode:
        run_with_main_grads([mode.from_tensor(t) for t in inputs])


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("auto", torch.bfloat16), ("cpu", torch.float32), ("reference", torch.bfloat16), ("auto", torch.float64)],
)
def test_the_meta_device(backend: str, dtype: torch.dtype) -> None:
    ops.set_backend(backend)
    inputs = make_inputs(CASE, dtype)
    meta = [t.to("meta") for t in inputs]
    if dtype is torch.float64:
        got, want = values_and_gradients(ops.moe_mlp, meta), values_and_gradients(ops.moe_mlp, inputs)
    else:
        got, want = run_all(meta), run_all(inputs)
        run_with_main_grads(meta)
    for name, value in want.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype) and got[name].is_meta, name


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_tracer_of_the_reference_is_never_given_mere_shapes(mode: str) -> None:
    """It would record them as the computation. Where it cannot do without values it says so."""
    ops.set_backend("reference")
    arguments = make_inputs(CASE, torch.float32)[:5]

    def layer(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        return ops.moe_mlp(x, gate_up, down, weights, indices)

    try:
        traced = make_fx(layer, tracing_mode=mode)(*arguments)
    except RuntimeError:
        return
    torch.testing.assert_close(traced(*arguments), ops.moe_mlp(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), [t for t in ROUTER_TARGETS if t.id != "triton"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_copies_compile_as_one_graph(backend: str, device: str, dynamic: bool | None) -> None:
    torch.compiler.reset()
    ops.set_backend(backend)
    x = torch.randn(12, 16, device=device)
    few, many = (torch.arange(n, dtype=torch.int32, device=device).view(-1, 2) for n in (12, 24))
    for run in (lambda a: ops.sum_copies(a, few), lambda a: ops.copy_rows(a, many, 24)):
        found = []
        for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            found.append((y, *torch.autograd.grad(y, leaf, y.detach())))
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@needs_sycl
def test_the_layer_of_the_sycl_backend_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    ops.set_backend("sycl")
    inputs = make_inputs(CASE, torch.float32)
    compiled = torch.compile(ops.moe_mlp, backend="aot_eager", fullgraph=True)
    got, want = values_and_gradients(compiled, inputs), values_and_gradients(ops.moe_mlp, inputs)
    assert all(torch.equal(got[name], want[name]) for name in want)
