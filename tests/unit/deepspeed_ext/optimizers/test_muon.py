"""Muon against torch.optim.Muon where that covers the case, against the singular value decomposition elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_ext.optimizers import Muon
from deepspeed_ext.optimizers.base import count_matrices
from deepspeed_ext.optimizers.muon import lr_ratio, orthogonalize


def pair(shape: tuple[int, ...]) -> tuple[nn.Parameter, nn.Parameter]:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(weights.clone()), nn.Parameter(weights.clone())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch(shape: tuple[int, int], adjust_lr_fn: str | None, nesterov: bool) -> None:
    theirs, ours = pair(shape)
    start = ours.detach().clone()
    options = {"lr": 0.05, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "weight_decay": 0.2}
    oracle = torch.optim.Muon([theirs], **options)  # type: ignore[arg-type]
    muon = Muon([ours], ns_dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
    for _ in range(4):
        theirs.grad = torch.randn(shape)
        ours.grad = theirs.grad.clone()
        oracle.step()
        muon.step()
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() < 1e-4 * moved
    torch.testing.assert_close(
        muon.state[ours]["shard"]["momentum_buffer"].view(shape), oracle.state[theirs]["momentum_buffer"]
    )


@pytest.mark.parametrize("shape", [(5, 12, 30), (2, 3, 30, 12)])
def test_leading_dimensions_are_matrices_of_their_own(shape: tuple[int, ...]) -> None:
    whole = nn.Parameter(torch.randn(shape))
    parts = [nn.Parameter(part.detach().clone()) for part in whole.view(-1, *shape[-2:])]
    together, apart = Muon([whole], lr=0.1), Muon(parts, lr=0.1)
    for _ in range(3):
        whole.grad = torch.randn(shape)
        for part, gradient in zip(parts, whole.grad.view(-1, *shape[-2:]), strict=True):
            part.grad = gradient.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole.detach().view(-1, *shape[-2:]), torch.stack([p.detach() for p in parts]))


def test_stacked_matrices_are_orthogonalised_one_by_one() -> None:
    stacked, upper, lower = nn.Parameter(torch.zeros(20, 8)), nn.Parameter(torch.zeros(10, 8)), None
    lower = nn.Parameter(torch.zeros(10, 8))
    stacked.stacked_matrices = 2  # type: ignore[attr-defined]
    stacked.grad = torch.randn(20, 8)
    upper.grad, lower.grad = (half.clone() for half in stacked.grad.split(10))
    Muon([stacked], lr=0.1).step()
    Muon([upper, lower], lr=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([upper, lower]).detach())
    with pytest.raises(ValueError, match="stacked_matrices=3 must divide its 20 rows"):
        count_matrices("w", (20, 8), 3)


def test_newton_schulz_gives_the_polar_factor_up_to_its_known_spread() -> None:
    batch_BMN = torch.randn(6, 24, 60, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(batch_BMN, full_matrices=False)
    for x, polar in ((batch_BMN, u @ vt), (batch_BMN.mT, (u @ vt).mT)):
        result = orthogonalize(x, 5, 1e-7)
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.6 and values.max() < 1.3
        cosine = (result * polar).sum((1, 2)) / result.norm(dim=(1, 2)) / polar.norm(dim=(1, 2))
        assert cosine.min() > 0.97


def test_large_batches_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_BMN = torch.randn(7, 6, 10)
    expected = orthogonalize(batch_BMN, 5, 1e-7)
    monkeypatch.setattr("deepspeed_ext.optimizers.muon.BATCH_ELEMENTS", 130)
    torch.testing.assert_close(orthogonalize(batch_BMN, 5, 1e-7), expected)


def test_scaling_all_gradients_does_not_change_the_update() -> None:
    """Clipping acts before the momentum; nothing scales the orthogonalised update."""
    one, other = pair((12, 20))
    muon = Muon([{"params": [one]}, {"params": [other]}], lr=0.1)
    for _ in range(3):
        one.grad = torch.randn(12, 20)
        other.grad = one.grad * 1e-3
        muon.step()
    torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def test_groups_without_muon_are_adamw() -> None:
    theirs, ours = pair((30,))
    oracle = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    muon = Muon(
        [
            {"params": [nn.Parameter(torch.zeros(4, 4))]},
            {"params": [ours], "use_muon": False, "betas": (0.8, 0.9), "adam_eps": 1e-6},
        ],
        lr=0.01,
        weight_decay=0.2,
    )
    for _ in range(5):
        theirs.grad = torch.randn(30)
        ours.grad = theirs.grad.clone()
        oracle.step()
        muon.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_bf16_parameter_has_an_fp32_master_and_strides_do_not_matter() -> None:
    weights = torch.randn(8, 12)
    exact, rounded = nn.Parameter(weights.clone()), nn.Parameter(weights.bfloat16().mT.contiguous().mT)
    with torch.no_grad():
        exact.copy_(rounded.float())
    muon = Muon([exact, rounded], lr=1e-3)
    for _ in range(20):
        exact.grad = torch.randn(8, 12)
        rounded.grad = exact.grad.bfloat16()
        exact.grad.copy_(rounded.grad.float())
        muon.step()
    assert not rounded.is_contiguous() and torch.equal(rounded, exact.bfloat16())


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\); put it into a group with use_muon=False"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="adjust_lr_fn='x' is unknown"):
        Muon([nn.Parameter(torch.zeros(3, 3))], adjust_lr_fn="x")
    with pytest.raises(ValueError, match="ns_steps=0"):
        Muon([nn.Parameter(torch.zeros(3, 3))], ns_steps=0)
    assert lr_ratio("match_rms_adamw", (100, 25)) == 2.0 and lr_ratio(None, (100, 25)) == 2.0
