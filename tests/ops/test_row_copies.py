"""Rows copied to several places and summed again, on every backend: the exact bits that fp32 gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from tests.ops.targets import INTERPRETED, ROUTER_TARGETS

each_target = pytest.mark.parametrize(("backend", "device"), ROUTER_TARGETS)

SHAPES = {  # rows, destinations, width, share of positions in use
    "some": (37, 5, 24, 0.6),
    "wide": (9, 3, 700, 0.5),
    "one row": (1, 4, 8, 1.0),
    "none needed": (6, 3, 8, 0.0),
    "no row": (0, 3, 8, 1.0),
    "one destination": (11, 1, 16, 0.7),
}
each_shape = pytest.mark.parametrize("name", SHAPES)


def positions_of(name: str) -> tuple[Tensor, int]:
    """Positions in an order of their own, with some rows that go nowhere, and the number of copies."""
    rows, places, _, share = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    used = torch.rand(rows, places, generator=generator) < share
    used[2::7] = False
    count = int(used.sum())
    positions = torch.full((rows, places), -1, dtype=torch.int32)
    positions[used] = torch.randperm(count, generator=generator).int()
    return positions, count


def copied(x: Tensor, positions: Tensor, count: int) -> Tensor:
    out = x.new_zeros(count, x.shape[1])
    for row, own in enumerate(positions.tolist()):
        for position in own:
            if position >= 0:
                out[position] = x[row]
    return out


def summed(y: Tensor, positions: Tensor) -> Tensor:
    """One addition after the other, from the first destination on."""
    wide = torch.promote_types(y.dtype, torch.float32)
    out = torch.zeros(positions.shape[0], y.shape[1], dtype=wide)
    for row, own in enumerate(positions.tolist()):
        for position in own:
            if position >= 0:
                out[row] += y[position].to(wide)
    return out.to(y.dtype)


@each_target
@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_and_gradients_bit_by_bit(backend: str, device: str, name: str, dtype: torch.dtype) -> None:
    if backend == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bf16")
    ops.set_backend(backend)
    positions, count = positions_of(name)
    width = SHAPES[name][2]
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(len(positions), width, generator=generator).to(dtype) for _ in range(2))
    y, dx = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(2))
    leaves = [t.to(device).requires_grad_() for t in (x, y)]
    there = positions.to(device)
    copies, sums = ops.copy_rows(leaves[0], there, count), ops.sum_copies(leaves[1], there)
    torch.autograd.backward([copies, sums], [dx.to(device), dy.to(device)])
    exact = dict(rtol=0, atol=0)
    torch.testing.assert_close(copies.cpu(), copied(x, positions, count), **exact)
    torch.testing.assert_close(sums.cpu(), summed(y, positions), **exact)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    torch.testing.assert_close(leaves[0].grad.cpu(), summed(dx, positions), **exact)
    torch.testing.assert_close(leaves[1].grad.cpu(), copied(dy, positions, count), **exact)


@each_target
def test_sums_are_rounded_once(backend: str, device: str) -> None:
    """256 + 1 + 1 in bf16 is 258; with a rounding after every addition it would stay 256."""
    ops.set_backend(backend)
    y = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device)
    positions = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    assert ops.sum_copies(y, positions).item() == 258


@each_target
def test_bits_that_are_no_numbers_are_copied_as_they_are(backend: str, device: str) -> None:
    """Integers travel in the bits of fp32: quiet and signalling NaN and denormals."""
    ops.set_backend(backend)
    bits = torch.tensor([[-1, 0, 1, 0x7F800001, 0x7FC00001, -(2**31), 95, 0x007FFFFF]], dtype=torch.int32)
    positions = torch.tensor([[1, -1, 0]], dtype=torch.int32, device=device)
    copies = ops.copy_rows(bits.view(torch.float32).to(device), positions, 2)
    assert torch.equal(copies.cpu().view(torch.int32), bits.expand(2, -1))


@each_target
def test_what_does_not_fit_is_refused(backend: str, device: str) -> None:
    ops.set_backend(backend)
    x = torch.zeros(3, 4, device=device)
    positions = torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"positions \(2, 2\) of 3 rows"):
        ops.copy_rows(x, positions[:2], 6)
    with pytest.raises(ValueError, match=r"positions torch.int64 \(3, 2\).* expected int32 \[T, P\]"):
        ops.sum_copies(x, positions.long())
    if device == "cpu":
        for wrong, what in {
            (0, 2, 2): "hold 1 0 times; expected each of 3 once",
            (0, 1, 3): r"hold 3; expected values in \[-1, 3\)",
            (0, 1, -5): "hold -5",
            (0, 1, -1): "hold 2 0 times",
        }.items():
            column = torch.tensor(wrong, dtype=torch.int32)[:, None]
            for call in (lambda p: ops.copy_rows(x, p, 3), lambda p: ops.sum_copies(x, p)):
                with pytest.raises(ValueError, match=what):
                    call(column)
    with pytest.raises(ValueError, match=r"rows torch\.int32"):
        ops.copy_rows(x.int(), positions, 6)
