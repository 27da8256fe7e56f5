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


def order_of(case: Case, seed: int = 0) -> tuple[sycl.CompactRowOrder, reference.RowOrder, Tensor, list[Tensor]]:
    """The order by the kernels and the reference's, the slot of each local row, and the case's inputs."""
    inputs = make_inputs(case, torch.float32, seed=seed)
    order, want = sycl.sort_slots(inputs[4], case.experts), reference.sort_slots(inputs[4], case.experts)
    return order, want, want.slots_N[: int(order.offsets[case.experts])], inputs


@each_size
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@each_case
def test_order_and_counts(name: str, index_dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    indices = make_inputs(case, torch.float32)[4].to(index_dtype)
    want = reference.sort_slots(indices, case.experts)
    sycl.set_work_sizes(*sizes)
    got = sycl.sort_slots(indices, case.experts)
    first_rows = [0, *want.counts_E.cumsum(0).tolist(), indices.numel(), indices.numel()]
    assert got.slots_N.tolist() == want.slots_N.tolist() and got.rows_N.tolist() == want.rows_TK.flatten().tolist()
    assert got.counts_E.tolist() == want.counts_E.tolist() and got.offsets.tolist() == first_rows


@each_size
@each_dtype
@pytest.mark.parametrize("width", [1, 7, 24, 200])
@pytest.mark.parametrize("name", ["no_tokens", "one_token", "odd_tokens", "some_foreign", "none_local"])
def test_combine(name: str, width: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    order, _, slots, (*_, weights, _indices, _dy) = order_of(case)
    num_slots = weights.numel()
    rows = torch.randn(num_slots, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    sycl.set_work_sizes(*sizes)
    by_slot = torch.zeros(num_slots, width).index_copy(0, slots, rows[: len(slots)].float())
    by_slot = by_slot.view(case.tokens, case.topk, width)
    assert_close(sycl.combine(rows, order, None, case.tokens), by_slot.sum(1), dtype)
    want = (by_slot * weights.unsqueeze(-1)).sum(1)
    assert_close(sycl.combine(rows, order, weights, case.tokens), want, dtype)


@each_size
@each_dtype
@pytest.mark.parametrize("inner", [1, 13, 24, 136])
@pytest.mark.parametrize("name", ["one_token", "odd_tokens", "some_foreign"])
def test_swiglu_backward(name: str, inner: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    case = MORE_CASES[name]
    order, _, slots, (*_, weights, _indices, _dy) = order_of(case)
    num_rows, num_slots = len(slots), weights.numel()
    g = torch.Generator().manual_seed(2)
    hidden = (3 * torch.randn(num_slots, 2 * inner, generator=g)).to(dtype)
    grad = torch.randn(num_slots, inner, generator=g).to(dtype)
    sycl.set_work_sizes(*sizes)

    leaf = hidden[:num_rows].double().requires_grad_()
    activation = reference.swiglu(leaf)
    weight_of_row = weights.reshape(-1)[slots].double().unsqueeze(-1)
    (want,) = torch.autograd.grad(activation, leaf, weight_of_row * grad[:num_rows], retain_graph=True)
    dhidden, weighted, dweights = sycl.swiglu_backward(hidden, grad, order, weights)
    assert_close(dhidden[:num_rows], want, dtype)
    assert_close(weighted[:num_rows], weight_of_row * activation, dtype)
    by_row = (activation * grad[:num_rows]).sum(-1)
    by_slot = torch.zeros(num_slots).double().index_copy(0, slots, by_row)
    assert_close(dweights.reshape(-1), by_slot, torch.float32)


@each_dtype
@pytest.mark.parametrize("tile", [64, 16])
@each_case
def test_products_of_the_forward(name: str, tile: int, dtype: torch.dtype) -> None:
    """The up projection, whose rows before SwiGLU are kept, and what the down projection makes of them."""
    case = MORE_CASES[name]
    _, order, slots, _ = order_of(case)
    inputs = make_inputs(case, dtype)
    sycl.set_work_sizes(tile=tile)
    y, [hidden] = sycl.moe_mlp_forward(*inputs[:5])
    x, gate_up, down, weights = (t.double() for t in inputs[:4])
    assert_close(hidden[: len(slots)], reference.grouped_linear(x[slots // case.topk], gate_up, order), dtype)
    assert_close(y, reference.moe_mlp(x, gate_up, down, weights, inputs[4]), dtype)


@each_dtype
@pytest.mark.parametrize("tile", [64, 16])
@each_case
def test_products_of_the_backward(name: str, tile: int, dtype: torch.dtype) -> None:
    case = MORE_CASES[name]
    order, compact, slots, _inputs = order_of(case)
    num_rows, num_slots, counts = len(slots), case.tokens * case.topk, order.counts_E
    token = slots // case.topk
    g = torch.Generator().manual_seed(3)
    out_width, in_width = 2 * case.inner, case.width
    weight = torch.randn(case.experts, out_width, in_width, generator=g).to(dtype)
    x_T, dout_T = (torch.randn(case.tokens, w, generator=g).to(dtype) for w in (in_width, out_width))
    x_N, dout_N = (torch.randn(num_slots, w, generator=g).to(dtype) for w in (in_width, out_width))
    sycl.set_work_sizes(tile=tile)

    def want(x: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        x, w = x.double().requires_grad_(), weight.double().requires_grad_()
        return torch.autograd.grad(reference.grouped_linear(x, w, compact), (x, w), dout.double())

    for gathered, dout, rows in ((False, dout_N, dout_N[:num_rows]), (True, dout_T, dout_T[token])):
        dx = sycl.grouped_input_gradient(dout, weight, order, gathered=gathered)
        assert_close(dx[:num_rows], want(x_N[:num_rows], rows)[0], dtype)
    for gathered, dout, x in (("dout", dout_T, x_N), ("x", dout_N, x_T)):
        dout_rows = dout[token] if gathered == "dout" else dout[:num_rows]
        gradient = want(x[token] if gathered == "x" else x[:num_rows], dout_rows)[1]
        got = sycl.grouped_weight_gradient(dout, x, order, gathered=gathered)
        assert_close(got, gradient, dtype)
        assert not got[counts == 0].any()
        for out_dtype in {dtype, torch.float32}:
            before = torch.randn(gradient.shape, generator=g).to(out_dtype)
            added = before.clone()
            sycl.grouped_weight_gradient(dout, x, order, added, gathered=gathered)
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
