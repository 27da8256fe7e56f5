"""Grouped products of Triton on a GPU, or under its interpreter: TRITON_INTERPRET=1 pytest -m gpu THIS_FILE."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import TOLERANCE
from tests.ops.triton_cases import COUNTS, DEVICE, DTYPES, NEEDS_TRITON, expert_rows, make_indices

pytestmark = NEEDS_TRITON


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
