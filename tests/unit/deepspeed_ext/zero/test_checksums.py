"""Checksums notice every single flipped bit, and rows that change places."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.zero.checksums import ROW, checksum
from tests.campaigns.bit_flips import flip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 7, 256, 2 * ROW, 5 * ROW + 13])
def test_every_bit_counts(dtype: torch.dtype, numel: int) -> None:
    whole = (torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel)) * 50).to(dtype)
    for tensor in (whole[:numel], whole[3:]):  # the second begins between two integers
        before, width = checksum(tensor), 8 * tensor.element_size()
        assert torch.equal(before, checksum(tensor.clone()))
        for place in {0, numel // 2, numel - 1}:
            for bit in range(width):
                flip(tensor, place, bit)
                assert not torch.equal(before, checksum(tensor)), (place, bit)
                flip(tensor, place, bit)
        assert torch.equal(before, checksum(tensor))


def test_the_order_of_rows_counts() -> None:
    tensor = torch.arange(4.0 * ROW)
    assert not torch.equal(checksum(tensor), checksum(tensor.view(2, -1).flip(0)))
    assert checksum(tensor.double()).dtype == torch.int64
    assert checksum(torch.zeros(0)).tolist() == checksum(torch.zeros(9)).tolist() == [0, 0]
