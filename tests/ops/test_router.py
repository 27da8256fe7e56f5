"""router_topk: the choice and every gradient against the reference; the Triton version only where CUDA is."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.optimus import ops
from megatron.optimus.ops import reference

SHAPES = [(1, 4, 1), (37, 64, 8), (130, 72, 3), (5, 1, 1), (9, 6, 6), (300, 384, 8)]
OPTIONS = list(itertools.product([False, True], repeat=3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("sigmoid", "normalize", "biased"), OPTIONS)
@pytest.mark.parametrize(("tokens", "experts", "topk"), SHAPES)
def test_triton_router_equals_the_reference(
    tokens: int, experts: int, topk: int, sigmoid: bool, normalize: bool, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) if biased else None
    dweights, dscores = (
        torch.randn(tokens, topk, generator=generator),
        torch.randn(tokens, experts, generator=generator),
    )
    results = []
    for fn, device in ((ops.router_topk, "cuda"), (reference.router_topk, "cpu")):
        leaf = logits.to(device).requires_grad_()
        shift = None if bias is None else bias.to(device)
        out = fn(leaf, topk, sigmoid=sigmoid, normalize=normalize, selection_bias_E=shift)
        gradients = (dweights.to(device), dscores.to(device))
        (grad,) = torch.autograd.grad((out.weights_TK, out.scores_TE), leaf, gradients)
        results.append([t.detach().cpu() for t in (*out, grad)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


def test_an_impossible_topk_raises() -> None:
    with pytest.raises(ValueError, match=r"topk=5 of logits \(3, 4\)"):
        ops.router_topk(torch.zeros(3, 4), 5)


def test_cpu_router_is_the_reference() -> None:
    logits = torch.randn(6, 5)
    got, want = ops.router_topk(logits, 2, normalize=True), reference.router_topk(logits, 2, normalize=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
