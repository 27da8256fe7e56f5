"""Each SYCL kernel, compiled by Intel's SYCL runtime and run on its CPU device, against plain PyTorch.

Needs two packages from PyPI (15 s, 1 GB); without them: pip install intel-sycl-rt==2026.2.0 intel-opencl-rt==2026.2.0
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus.ops import reference, sycl
from tests.ops.cases import CASES, TOLERANCE, Case, make_inputs
from tests.ops.sycl_device import WORK_SIZES, needs_sycl

pytestmark = [needs_sycl, pytest.mark.usefixtures("default_work_sizes")]
MORE_CASES = {**CASES, "no_tokens": Case(0, 16, 8, 4, 2), "many_blocks": Case(700, 8, 8, 37, 3, "some_foreign")}
each_case = pytest.mark.parametrize("name", MORE_CASES)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_size = pytest.mark.parametrize("sizes", WORK_SIZES, ids=str)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole tensor; ``want`` in fp32 or fp64."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / (want.double().norm() or torch.ones(()))
    assert error <= TOLERANCE[dtype], f"{error:.2e} > {TOLERANCE[dtype]:.0e}"


def order_of(case: Case, seed: int = 0) -> tuple[reference.RowOrder, Tensor, list[Tensor]]:
    """The order by the kernels, the token of each local row, and the case's inputs."""
    inputs = make_inputs(case, torch.float32, seed=seed)
    order = sycl.sort_slots(inputs[4], case.experts)
    slots = reference.sort_slots(inputs[4], case.experts).slots_P.long()
    return order, slots[: int(order.plan[0][case.experts])], inputs


@each_size
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@each_case
def test_order_and_counts(name: str, index_dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    indices = make_inputs(case, torch.float32)[4].to(index_dtype)
    want = reference.sort_slots(indices, case.experts)
    sycl.set_work_sizes(*sizes)
    got = sycl.sort_slots(indices, case.experts)
    for name_of_tensor in ("slots_P", "rows_N", "counts_E"):
        assert torch.equal(getattr(got, name_of_tensor), getattr(want, name_of_tensor)), name_of_tensor
    assert torch.equal(got.plan[0], want.plan[0])


@each_size
@each_dtype
@pytest.mark.parametrize("width", [1, 7, 24, 200])
@pytest.mark.parametrize("name", ["no_tokens", "one_token", "odd_tokens", "some_foreign", "none_local"])
def test_gather_and_combine(name: str, width: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    order, slots, (*_, weights, _indices, _dy) = order_of(case)
    num_rows, num_slots = len(slots), weights.numel()
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(case.tokens, width, generator=g).to(dtype) for _ in range(2))
    rows = torch.randn(num_slots, width, generator=g).to(dtype)
    sycl.set_work_sizes(*sizes)

    assert torch.equal(sycl.gather_rows(x, order)[:num_rows], x[slots // case.topk])

    by_slot = torch.zeros(num_slots, width).index_copy(0, slots, rows[:num_rows].float())
    by_slot = by_slot.view(case.tokens, case.topk, width)
    assert_close(sycl.combine(rows, order, None, case.tokens), by_slot.sum(1), dtype)
    want = (by_slot * weights.unsqueeze(-1)).sum(1)
    assert_close(sycl.combine(rows, order, weights, case.tokens), want, dtype)

    drows, dweights = sycl.combine_backward(dy, rows, order, weights)
    weight_of_row = weights.reshape(-1)[slots].unsqueeze(-1)
    assert_close(drows[:num_rows], weight_of_row * dy[slots // case.topk].float(), dtype)
    assert_close(dweights, (by_slot * dy.float().unsqueeze(1)).sum(-1), torch.float32)


@each_size
@each_dtype
@pytest.mark.parametrize("inner", [1, 13, 24, 136])
@pytest.mark.parametrize("name", ["one_token", "odd_tokens", "some_foreign"])
def test_swiglu(name: str, inner: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    order, slots, (*_, weights, _indices, _dy) = order_of(case)
    num_rows, num_slots = len(slots), weights.numel()
    g = torch.Generator().manual_seed(2)
    hidden = (3 * torch.randn(num_slots, 2 * inner, generator=g)).to(dtype)
    grad = torch.randn(num_slots, inner, generator=g).to(dtype)
    sycl.set_work_sizes(*sizes)

    leaf = hidden[:num_rows].double().requires_grad_()
    activation = reference.swiglu(leaf)
    assert_close(sycl.swiglu(hidden, order)[:num_rows], activation, dtype)

    weight_of_row = weights.reshape(-1)[slots].double().unsqueeze(-1)
    for used in (weights, None):
        factor = torch.ones_like(weight_of_row) if used is None else weight_of_row
        (want,) = torch.autograd.grad(activation, leaf, factor * grad[:num_rows], retain_graph=True)
        dhidden, weighted, dweights = sycl.swiglu_backward(hidden, grad, order, used)
        assert_close(dhidden[:num_rows], want, dtype)
        assert_close(weighted[:num_rows], factor * activation, dtype)
        if dweights is not None:
            by_row = (activation * grad[:num_rows]).sum(-1)
            assert_close(
                dweights.reshape(-1), torch.zeros(num_slots).double().index_copy(0, slots, by_row), torch.float32
            )


@each_dtype
@pytest.mark.parametrize("tile", [64, 16])
@each_case
def test_grouped_gemm(name: str, tile: int, dtype: torch.dtype) -> None:
    case = MORE_CASES[name]
    order, slots, _inputs = order_of(case)
    num_rows, num_slots, counts = len(slots), case.tokens * case.topk, order.counts_E
    token = slots // case.topk
    g = torch.Generator().manual_seed(3)
    out_width, in_width = 2 * case.inner, case.width
    weight = torch.randn(case.experts, out_width, in_width, generator=g).to(dtype)
    x_T, dout_T = (torch.randn(case.tokens, w, generator=g).to(dtype) for w in (in_width, out_width))
    x_N, dout_N = (torch.randn(num_slots, w, generator=g).to(dtype) for w in (in_width, out_width))
    sycl.set_work_sizes(tile=tile)

    def want(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = x.double().requires_grad_(), weight.double().requires_grad_()
        y = reference.grouped_linear(x, w, order)
        return y, *torch.autograd.grad(y, (x, w), dout.double())

    y, dx, dw = want(x_N[:num_rows], dout_N[:num_rows])
    assert_close(sycl.grouped_linear(x_N, weight, order)[:num_rows], y, dtype)
    assert_close(sycl.grouped_input_gradient(dout_N, weight, order)[:num_rows], dx, dtype)
    got = sycl.grouped_weight_gradient(dout_N, x_N, order)
    assert_close(got, dw, dtype)
    assert not got[counts == 0].any()
    activation, hidden = sycl.grouped_linear_swiglu(x_N, weight, order)
    assert_close(hidden[:num_rows], y, dtype)
    assert_close(activation[:num_rows], reference.swiglu(y.detach()), dtype)

    y, dx, dw = want(x_T[token], dout_T[token])
    assert_close(sycl.grouped_linear(x_T, weight, order, gathered=True)[:num_rows], y, dtype)
    activation, hidden = sycl.grouped_linear_swiglu(x_T, weight, order, gathered=True)
    assert_close(hidden[:num_rows], y, dtype)
    assert_close(activation[:num_rows], reference.swiglu(y.detach()), dtype)
    assert_close(sycl.grouped_input_gradient(dout_T, weight, order, gathered=True)[:num_rows], dx, dtype)
    for out_dtype in {dtype, torch.float32}:
        before = torch.randn(dw.shape, generator=g).to(out_dtype)
        for gathered, dout, x in (("dout", dout_T, x_N), ("x", dout_N, x_T)):
            added = before.clone()
            sycl.grouped_weight_gradient(dout, x, order, added, gathered=gathered)
            dout_rows = dout[token] if gathered == "dout" else dout[:num_rows]
            x_rows = x[token] if gathered == "x" else x[:num_rows]
            gradient = want(x_rows, dout_rows)[2]
            assert_close(added, before + gradient, out_dtype)
            sycl.grouped_weight_gradient(dout, x, order, added.fill_(torch.nan), False, gathered=gathered)
            assert_close(added, gradient, out_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# 1.5: every second product lies halfway between two values
@pytest.mark.parametrize("weight", [1.0, 1.5, 0.7309, 3.0e-5, 1.7e4])
def test_every_value_of_a_16_bit_type_is_read_and_rounded_like_torch(dtype: torch.dtype, weight: float) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
    order = sycl.sort_slots(torch.zeros(1024, 1, dtype=torch.int64), 1)
    got = sycl.combine(values, order, torch.full((1024, 1), weight), 1024)
    want = (values.float() * weight).to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    tiny = torch.finfo(torch.float32).tiny
    normal = want.float().abs() >= tiny  # a device may flush subnormals of fp32, which bf16 has too
    same = got.view(torch.int16) == want.view(torch.int16)
    assert same[normal].all()
    assert (got.float()[~normal & ~want.isnan()].abs() <= tiny).all()
