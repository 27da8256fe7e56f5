"""Float8 linear layers and MLPs: on the CPU against an independent computation, on a GPU against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus.ops import fp8
from tests.ops.targets import needs_hopper

on_gpu = [needs_hopper, pytest.mark.gpu]
TARGETS = [pytest.param("cpu", torch.float32, id="cpu"), pytest.param("cuda", torch.bfloat16, id="cuda", marks=on_gpu)]
each = pytest.mark.parametrize(("device", "dtype"), TARGETS)


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as ``dtype`` holds it with one scale, in float64."""
    limit = torch.finfo(dtype).max
    scale = x.abs().max().double() / limit if x.abs().max() > 0 else torch.tensor(1.0, dtype=torch.float64)
    return (x.double() / scale).float().to(dtype).double() * scale


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm()).item()


@each
@pytest.mark.parametrize("form", [fp8.FORWARD, fp8.GRADIENT], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (100, 48), (130, 272), (256, 128)], ids=str)
def test_a_quantized_matrix_is_its_nearest_numbers_and_their_transpose(
    device: str, dtype: torch.dtype, form: torch.dtype, shape: tuple[int, int]
) -> None:
    parts = [made(*shape, seed=seed, dtype=dtype, device=device) * 10 ** (2 * seed) for seed in range(2)]
    for dim in (0, 1):
        got = fp8.quantize(parts, form, dim)
        joined = torch.cat(parts, dim).cpu()
        want = rounded(joined, form)
        values = got.rows.double().cpu() * got.scale.item()
        # A quotient half way between two numbers may be rounded to either.
        steps = (values - want).abs() / want.abs().clamp(min=want.abs().max() * 2**-16)
        assert steps.max() <= 2**-1 and (steps > 1e-5).double().mean() < 0.01
        assert relative(values, joined.double()) < 0.04 if form is fp8.FORWARD else 0.07
        rows = joined.shape[0]
        assert torch.equal(got.columns[:, :rows].double().t(), got.rows.double())
        assert got.columns.shape[1] == -(-rows // 16) * 16 and not got.columns[:, rows:].double().any()


def test_zeros_and_values_that_are_not_finite() -> None:
    zero = fp8.quantize([torch.zeros(16, 16)], fp8.FORWARD)
    assert zero.scale == 1 and not zero.rows.float().any()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 5] = bad
        one = fp8.quantize([x], fp8.FORWARD)
        assert not (one.rows.float() * one.scale).isfinite().all(), "a value that is not finite must not become finite"


def linear_of_rounded(x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs, then gradients of input and weights, in float64 of what float8 keeps."""
    x8, w8 = rounded(x, fp8.FORWARD), rounded(torch.cat(weights), fp8.FORWARD)
    dy = rounded(torch.cat(grads, 1), fp8.GRADIENT)
    widths = [weight.shape[0] for weight in weights]
    return [*(x8 @ w8.t()).split(widths, 1), dy @ w8, *(dy.t() @ x8).split(widths)]


@each
@pytest.mark.parametrize(("tokens", "widths"), [(64, (48,)), (100, (32, 16, 64)), (3, (16, 16))], ids=str)
def test_linear_layers_multiply_what_float8_keeps(
    device: str, dtype: torch.dtype, tokens: int, widths: tuple[int, ...]
) -> None:
    x = made(2, tokens, 80, seed=0, dtype=dtype, device=device).requires_grad_()
    weights = [
        made(width, 80, seed=9 + i, dtype=dtype, device=device).requires_grad_() for i, width in enumerate(widths)
    ]
    grads = [made(2, tokens, width, seed=99 + i, dtype=dtype, device=device) for i, width in enumerate(widths)]
    outputs = fp8.linear(x, weights)
    found = [*outputs, *torch.autograd.grad(outputs, [x, *weights], grads)]
    want = linear_of_rounded(
        x.detach().cpu().flatten(0, 1), [w.detach().cpu() for w in weights], [g.cpu().flatten(0, 1) for g in grads]
    )
    for one, other in zip(found, want, strict=True):
        assert relative(one.reshape(other.shape), other) < (2e-3 if device == "cpu" else 6e-3)


@each
def test_the_mlp_is_near_the_exact_one(device: str, dtype: torch.dtype) -> None:
    x = made(3, 40, 64, seed=0, dtype=dtype, device=device).requires_grad_()
    weights = [
        made(*shape, seed=i, dtype=dtype, device=device) / 8 for i, shape in enumerate([(96, 64)] * 2 + [(64, 96)])
    ]
    for weight in weights:
        weight.requires_grad_()
    grad = made(3, 40, 64, seed=7, dtype=dtype, device=device)
    y = fp8.mlp(x, *weights)
    found = [y, *torch.autograd.grad(y, [x, *weights], grad)]
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, *weights)]
    want_y = F.linear(F.silu(F.linear(exact[0], exact[1])) * F.linear(exact[0], exact[2]), exact[3])
    want = [want_y, *torch.autograd.grad(want_y, exact, grad.cpu().double())]
    errors = [relative(one, other) for one, other in zip(found, want, strict=True)]
    assert all(1e-3 < error < 0.12 for error in errors), errors  # 2^-4 and 2^-3 of each number at most; never exact


@pytest.mark.gpu
@needs_hopper
def test_the_mlp_on_a_gpu_rounds_as_the_cpu_does() -> None:
    arguments = [
        made(*shape, seed=i, dtype=torch.bfloat16) / 4
        for i, shape in enumerate([(96, 64), (160, 64), (160, 64), (64, 160)])
    ]
    grad = made(96, 64, seed=7, dtype=torch.bfloat16)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in arguments]
        y = fp8.mlp(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, grad.to(device))])
    for one, other in zip(*found, strict=True):
        assert relative(other, one) < 0.02  # some quotients are rounded the other way


def test_widths_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight \(24, 16\).*multiples of 16"):
        fp8.linear(torch.ones(2, 16), [torch.ones(24, 16)])


def test_there_is_no_second_derivative() -> None:
    x = made(32, 16, seed=0).requires_grad_()
    weight = made(16, 16, seed=1).requires_grad_()
    [y] = fp8.linear(x, [weight])
    [dx] = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        dx.sum().backward()


def test_constant_weights_are_quantized_once() -> None:
    x, weight = made(32, 16, seed=0), made(16, 16, seed=1)
    [before] = fp8.linear(x, [weight])
    with fp8.constant_weights():
        [first] = fp8.linear(x, [weight])
        weight.mul_(2)  # what nobody may do
        [second] = fp8.linear(x, [weight])
    [after] = fp8.linear(x, [weight])
    assert torch.equal(before, first) and torch.equal(first, second) and torch.equal(after, 2 * first)


def test_what_a_replay_has_quantized_is_kept() -> None:
    """A step whose first micro-batch was a graph, which wrote the weights to where an earlier step had them."""
    x, weight = made(32, 16, seed=0), made(16, 16, seed=1)
    with fp8.constant_weights():
        [first] = fp8.linear(x, [weight])
        written = fp8.kept_so_far()
    weight.mul_(2)
    with fp8.constant_weights():
        fp8.keep(written)
        [replayed] = fp8.linear(x, [weight])
    fp8.keep(written)  # outside of a step: nothing
    [after] = fp8.linear(x, [weight])
    assert len(written) == 1 and torch.equal(replayed, first) and torch.equal(after, 2 * first)
