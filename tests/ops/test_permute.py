"""Rows spread over experts, summed again and the backward of SwiGLU, with every candidate of tiles: the right values.

On a GPU, or under Triton's interpreter: TRITON_INTERPRET=1 pytest THIS_FILE.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.targets import HAS_CUDA, INTERPRETED

if not (HAS_CUDA or INTERPRETED):
    pytest.skip("neither CUDA nor Triton's interpreter", allow_module_level=True)

from megatron.optimus.ops.triton import permute, row_order
from tests.ops.test_autotune import DEVICE, DTYPE, different, is_close


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)


def two_slots() -> row_order.PaddedRowOrder:
    """Of one expert and three tokens, the second of which goes elsewhere."""
    return row_order.order_rows(torch.tensor([[0], [-1], [0]], device=DEVICE), 1)


def test_every_candidate_spreads_and_sums_the_right_rows() -> None:
    width = 1100  # of the rows: more than most candidates take at once, and no multiple of it
    plan = two_slots()
    used, place = plan.slot_P >= 0, plan.slot_P.clamp(min=0).long()
    num_used = int(plan.num_tiles) * row_order.ROW_TILE

    x, values = random(3, width, seed=5), random(used.numel(), width, seed=6)
    for tiles in different("spread_rows"):
        got = permute.spread_rows(x, plan, 1, tiles=tiles)
        assert torch.equal(got[used], x[place[used]]) and not got[:num_used][~used[:num_used]].any(), tiles
    for tiles in different("sum_rows"):
        got = permute.sum_rows(values, plan, None, 1, torch.empty_like(x), tiles)
        assert torch.equal(got[place[used]], values[used]) and not got[plan.row_N < 0].any(), tiles


def test_every_candidate_of_the_backward_of_swiglu_is_right() -> None:
    plan = two_slots()
    plan.num_tiles.fill_(2)  # of two: slot 1 in the very last row
    plan.slot_P[-1] = 1
    plan.tile_shift[1] = 100
    used, place = plan.slot_P >= 0, plan.slot_P.clamp(min=0).long()
    width = 520
    hidden, da = random(used.numel(), 2 * width, seed=7), random(used.numel(), width, seed=8)
    weight = torch.rand(used.numel(), generator=torch.Generator().manual_seed(1)).to(DEVICE) * used
    leaf, scale = hidden.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    activation = torch.nn.functional.silu(gate) * up * scale[:, None]
    want_hidden, want_weight = torch.autograd.grad(activation, (leaf, scale), da.double())
    kept = torch.full_like(hidden[100:], torch.nan)
    kept[:2], kept[-1] = hidden[:2], hidden[-1]
    for tiles in different("swiglu_backward"):
        changed = da.clone()
        dhidden, dweights = permute.swiglu_backward_(changed, kept, weight, plan, 1, tiles)
        assert is_close(dhidden[used], want_hidden[used], 2e-3) and is_close(changed[used], activation[used], 2e-3)
        assert is_close(dweights[place[used], 0], want_weight[used], 1e-5), tiles
        assert not dhidden[~used].any() and not changed[~used].any(), tiles
