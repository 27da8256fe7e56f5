"""Operations on tensors without values, fake ones and those of the meta device, and in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.optimus import ops
from tests.ops.cases import Case, make_inputs, values_and_gradients
from tests.ops.sycl_device import needs_sycl
from tests.ops.targets import SINGLE_TARGETS, TARGETS

CASE = Case(12, 16, 8, 3, 2)
DTYPE = {"triton": torch.float16, "cuda": torch.bfloat16}


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

    order = ops.sort_slots(indices, CASE.experts, x.dtype)
    keep("moe_mlp", lambda *a: ops.moe_mlp(*a, indices), x, gate_up, down, weights)
    rows = keep("gather_rows", lambda a: ops.gather_rows(a, order), x)
    hidden = keep("grouped_linear", lambda a, b: ops.grouped_linear(a, b, order), rows, gate_up)
    keep("grouped_linear_swiglu", lambda a, b: ops.grouped_linear_swiglu(a, b, order), rows, gate_up)
    narrow = keep("swiglu", lambda a: ops.swiglu(a, order), hidden)
    keep("combine", lambda a, b: ops.combine(a, order, b), ops.grouped_linear(narrow, down, order), weights)
    found["grouped_input_gradient"] = ops.grouped_input_gradient(hidden, gate_up, order)
    found["grouped_weight_gradient"] = ops.grouped_weight_gradient(hidden, rows, order)
    positions = torch.arange(24, dtype=torch.int32, device=x.device).view(12, 2)
    keep("copy_rows", lambda a: ops.copy_rows(a, positions, 24), x)
    keep("sum_copies", lambda a: ops.sum_copies(a, positions), torch.cat((x, x)))
    keep("route", lambda a, b: ops.route(a, b, 2)[1], x, down[:, :, 0])
    logits = torch.ones(12, 3, device=x.device)
    keep("router_topk", lambda a: ops.router_topk(a, 2).weights_TK, logits)
    found["expert_counts"] = ops.expert_counts(indices, CASE.experts)
    table = torch.ones(4, 8, device=x.device)
    keep("rotate", lambda a: ops.rotate(a, table, table), x.new_ones(2, 3, 4, 8))
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
    if dtype is torch.float64:  # combine would ask for router weights in fp64
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


@pytest.mark.parametrize(("backend", "device"), [t for t in SINGLE_TARGETS if t.id != "triton"])
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
