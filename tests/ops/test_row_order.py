"""The order of rows by experts, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.triton_cases import COUNTS, NEEDS_TRITON, make_indices

pytestmark = NEEDS_TRITON


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
