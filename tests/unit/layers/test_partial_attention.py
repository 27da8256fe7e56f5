"""Attention over parts of the keys, merged, is attention over all of them; kernel and plain path agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.optimus.layers import partial_attention
from megatron.optimus.layers.partial_attention import attend_part, attend_part_backward, merge


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("path", ["kernel", "plain"])
def test_parts_make_up_the_whole(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Seven causal keys after six that all see, in two steps; gradients from the merged result."""
    if path == "plain":  # in pieces of two queries
        monkeypatch.setattr(partial_attention, "MAX_SCORES", 2 * 2 * 3 * 7)
        monkeypatch.setattr(partial_attention, "_has_cpu_kernel", lambda q: False)
    q, k, v = rand(2, 3, 7, 8).requires_grad_(), rand(2, 3, 13, 8).requires_grad_(), rand(2, 3, 13, 8).requires_grad_()
    mask = torch.cat((torch.ones(7, 6, dtype=torch.bool), torch.ones(7, 7, dtype=torch.bool).tril()), dim=1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grad = rand(*expected.shape)
    expected.backward(grad)
    with torch.no_grad():
        out, lse = attend_part(q, k[:, :, 6:], v[:, :, 6:], True)
        out, lse = out.clone(), lse.clone()
        merge(out, lse, *attend_part(q, k[:, :, :6], v[:, :, :6], False))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        dq1, dk1, dv1 = attend_part_backward(grad, q, k[:, :, 6:], v[:, :, 6:], out, lse, True)
        dq0, dk0, dv0 = attend_part_backward(grad, q, k[:, :, :6], v[:, :, :6], out, lse, False)
    torch.testing.assert_close(dq0 + dq1, q.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat((dk0, dk1), dim=2), k.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat((dv0, dv1), dim=2), v.grad, rtol=1e-5, atol=1e-6)
