"""Single Triton kernels on a GPU, or under Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu THIS_FILE."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from tests.ops.cases import TOLERANCE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]  # its dot has no bf16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]

COUNTS = {
    "one_row": [1],
    "empty_experts": [0, 5, 0, 0, 70, 0],
    "no_rows": [0, 0, 0],
    "tile_edges": [63, 64, 65, 127, 128, 129],
    "skewed": [3, 1, 900, 40, 40],
    "more_slots_than_a_block": [517, 0, 300, 301],
}


def make_indices(counts: list[int], seed: int = 0) -> Tensor:
    """[T, 1] choices with the given number of slots per expert, and a few foreign slots, shuffled."""
    experts = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.full((7,), -1)])
    return experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))][:, None].to(DEVICE)


def expert_rows(values_TD: Tensor, indices_T1: Tensor, expert: int) -> Tensor:
    return values_TD[indices_T1[:, 0] == expert]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_row_order_is_stable_and_complete(counts: list[int]) -> None:
    from megatron.optimus.ops.triton import row_order

    indices = make_indices(counts)
    order = row_order.order_rows(indices, len(counts))
    assert order.count_E.tolist() == counts
    row_N, slot_P = order.row_N.tolist(), order.slot_P.tolist()
    for expert, count in enumerate(counts):
        slots = [n for n, e in enumerate(indices[:, 0].tolist()) if e == expert]
        first = int(order.first_row_E[expert])
        assert slot_P[first : first + count] == slots
        assert [row_N[n] for n in slots] == list(range(first, first + count))
        shifts = order.tile_shift[first // row_order.ROW_TILE : -(-(first + count) // row_order.ROW_TILE)].tolist()
        assert set(shifts) <= {first - sum(counts[:expert])} and bool(shifts) == (count > 0)
    assert sum(slot >= 0 for slot in slot_P) == sum(counts)
    assert all(row_N[n] == -1 for n, e in enumerate(indices[:, 0].tolist()) if e < 0)
    assert order.by_size_E.tolist() == sorted(range(len(counts)), key=lambda e: (-counts[e], e))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_hidden_without_padding_has_the_rows_of_slots_and_nothing_else(counts: list[int]) -> None:
    from megatron.optimus.ops.triton import grouped_gemm, permute, row_order

    indices = make_indices(counts)
    order = row_order.order_rows(indices, len(counts))
    generator = torch.Generator().manual_seed(2)
    x, weight = (
        torch.randn(*shape, generator=generator).to(torch.float16).to(DEVICE)
        for shape in ((len(indices), 40), (len(counts), 2 * 24, 40))
    )
    x_rows = permute.spread_rows(x, order, 1)
    padded, _ = grouped_gemm.up_swiglu(x_rows, weight, order)
    torch.use_deterministic_algorithms(True)  # new tensors are NaN
    try:
        kept, _ = grouped_gemm.up_swiglu(x_rows, weight, order, without_padding=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(kept) == len(indices)
    assert torch.equal(kept[: sum(counts)], padded[order.slot_P >= 0])
    assert kept[sum(counts) :].isnan().all()  # room of foreign slots


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [True, False], ids=["added", "written"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, "same"], ids=["new", "fp32", "same"])
def test_weight_gradient(
    counts: list[int], dtype: torch.dtype, out_dtype: torch.dtype | str | None, accumulate: bool
) -> None:
    """A new gradient, one added to a main gradient or written over it: every expert's product in fp64, rounded once."""
    from megatron.optimus.ops.triton import grouped_gemm, permute, row_order

    generator = torch.Generator().manual_seed(1)
    indices = make_indices(counts)
    order = row_order.order_rows(indices, len(counts))
    a, b = (torch.randn(len(indices), width, generator=generator).to(dtype).to(DEVICE) for width in (40, 72))
    a_rows, b_rows = (permute.spread_rows(t, order, 1) for t in (a, b))
    want = torch.stack(
        [expert_rows(a, indices, e).T.double() @ expert_rows(b, indices, e).double() for e in range(len(counts))]
    )
    if out_dtype is None:
        got = grouped_gemm.weight_gradient(a_rows, b_rows, order)
        assert got.dtype == dtype
    else:
        main = torch.randn(len(counts), 40, 72, generator=generator) * 3
        main = main.to(dtype if out_dtype == "same" else torch.float32).to(DEVICE)
        want = want + main.double() if accumulate else want
        got = grouped_gemm.weight_gradient(
            a_rows, b_rows, order, out=main if accumulate else main.fill_(torch.nan), accumulate=accumulate
        )
        assert got.data_ptr() == main.data_ptr()
    tolerance = 2e-6 if out_dtype == torch.float32 else TOLERANCE[dtype] / 3
    assert (got.double() - want).norm() <= tolerance * (want.norm() or torch.ones(()))


def test_weight_gradient_refuses_an_out_that_does_not_fit() -> None:
    from megatron.optimus.ops.triton import grouped_gemm, row_order

    order = row_order.order_rows(make_indices([4, 4]), 2)
    a = torch.zeros(order.slot_P.shape[0], 16, dtype=torch.float16, device=DEVICE)
    wrong = [
        torch.zeros(2, 16, 8, device=DEVICE),
        torch.zeros(2, 16, 16, dtype=torch.float64, device=DEVICE),
        torch.zeros(2, 16, 32, device=DEVICE)[:, :, ::2],
    ]
    for out in wrong:
        with pytest.raises(ValueError, match="weight_gradient: out"):
            grouped_gemm.weight_gradient(a, a, order, out=out)


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton's interpreter, which keeps bf16 as bits and would multiply these."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(factor):
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        values = interpreter._convert_float(factor.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("shape", [(1, 8, 1), (70, 136, 20), (150, 130, 36), (70, 264, 96), (33, 40, 130)], ids=str)
def test_gradients_of_the_routers_product(shape: tuple[int, int, int]) -> None:
    """What is left where the first 8 bits cancel: so all parts of an fp32 gradient go into both products."""
    from megatron.optimus.ops.triton import router_linear

    tokens, width, experts = shape
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (tokens, experts))
    dlogits = torch.randn(tokens, experts, generator=generator)

    def close(got: Tensor, want: Tensor) -> bool:
        assert got.dtype == torch.bfloat16
        return bool((got.double().cpu() - want).norm() <= 2**-7 * want.norm())

    def parts_of(dlogits: Tensor) -> Tensor:
        """Of logits of which nothing else was made."""
        scores, nothing = torch.zeros(*dlogits.shape, device=DEVICE), torch.zeros(len(dlogits), 1, device=DEVICE)
        return router_linear.gradient_parts(scores, nothing.long(), nothing, None, dlogits.to(DEVICE), False, False)

    product = dlogits.double() @ weight.double()
    parts, there = parts_of(dlogits), weight.to(DEVICE)
    torch.testing.assert_close(parts.double().sum(1)[:, :experts].cpu(), dlogits.double(), rtol=2**-23, atol=1e-30)
    assert not parts[:, :, experts:].any()
    assert close(router_linear.input_gradient(parts, there, None), product)
    dx = -product.bfloat16()
    got = router_linear.input_gradient(parts, there, dx.to(DEVICE))
    assert close(got, product + dx.double())
    products = (
        torch.randn(3, 32 * -(-experts // 32), width, generator=generator)
        * torch.tensor([1.0, 2**-8, 2**-16])[:, None, None]
    )
    got = router_linear.sum_parts(products.flatten(0, 1).to(DEVICE), experts, torch.float32)
    torch.testing.assert_close(got.cpu().double(), products.double().sum(0)[:experts], rtol=1e-6, atol=1e-7)
    if INTERPRETED:
        return  # the weight's gradient is cuBLAS's product
    twice_x, both = torch.cat([x, x]), torch.cat([dlogits, -dlogits.bfloat16().float()])
    parts, twice_x = parts_of(both), twice_x.to(DEVICE)
    got = router_linear.weight_gradient(parts, twice_x, experts)
    assert close(got, both.double().T @ twice_x.double().cpu())
    assert torch.equal(got, router_linear.weight_gradient(parts, twice_x, experts))


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 2, 1), (70, 136, 20, 3), (200, 264, 96, 8)], ids=str)
def test_a_routers_product_and_its_choice(shape: tuple[int, int, int, int], biased: bool) -> None:
    """Logits as in fp64; all that is made of them has the bits that the choice alone makes of these logits."""
    from megatron.optimus.ops.triton import router, router_linear

    tokens, width, experts, topk = shape
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (tokens, experts))
    bias = torch.randn(experts, generator=generator).to(DEVICE) if biased else None
    *got, logits = router_linear.route(x.to(DEVICE), weight.to(DEVICE), topk, biased, True, bias)
    want = x.double() @ weight.double().T
    assert (logits.double().cpu() - want).norm() <= 1e-5 * want.norm()
    for a, b in zip(got, router.router_topk(logits, topk, biased, True, bias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
