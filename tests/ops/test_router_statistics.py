"""The router's losses, counts and entropy on every backend, against the specification in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import reference
from tests.ops.test_router import each_target


@pytest.mark.parametrize(
    "shape", [(1, 4, 1), (37, 64, 8), (130, 72, 3), (5, 2, 1), (3000, 6, 2), (40, 384, 8)], ids=str
)
@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
@each_target
def test_statistics(backend: str, device: str, shape: tuple[int, int, int], sigmoid: bool) -> None:
    ops.set_backend(backend)
    tokens, experts, topk = shape
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(tokens, experts, generator=generator)
    dshare, dz = torch.randn(experts, generator=generator), torch.randn((), generator=generator)
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    indices = reference.router_topk(logits, topk, sigmoid=sigmoid).indices_TK
    found = []
    for kind, place in ((torch.float64, "cpu"), (torch.float32, device)):
        leaves = [t.to(place, kind).requires_grad_() for t in (logits, scores)]
        if place == device and kind is torch.float32:
            out = ops.router_statistics(*leaves, indices.to(place))
        else:
            out = reference.router_statistics(*leaves, reference.expert_counts(indices, experts))
        given = (dshare.to(place, kind), dz.to(place, kind))
        both = torch.autograd.grad((out.share_E, out.z_loss), leaves, given, retain_graph=True)
        alone = torch.autograd.grad(out.z_loss, leaves[0], given[1])
        assert not out.entropy.requires_grad and out.counts_E.dtype == torch.int64
        found.append([t.detach().double().cpu() for t in (*out, *both, *alone)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6 * max(1e-2, float(want.abs().max())))


def test_statistics_of_what_does_not_fit_are_refused() -> None:
    logits, indices = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"router_statistics: \[\(3, 4\), \(3, 5\), \(3, 2\)\]"):
        ops.router_statistics(logits, torch.ones(3, 5), indices)
    with pytest.raises(ValueError, match="on cpu but another is on meta"):
        ops.router_statistics(logits, logits.to("meta"), indices)
    with pytest.raises(ValueError, match=r"indices torch\.float32"):
        ops.router_statistics(logits, logits, indices.float())
