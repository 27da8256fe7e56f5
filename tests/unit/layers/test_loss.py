"""The fused projection and loss equals the plain one, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.optimus.layers import NO_LABEL, loss
from megatron.optimus.layers.loss import LMHead, linear_cross_entropy_sum

TOKENS, WIDTH, VOCAB = 23, 12, 37


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[[0, 7, 22]] = NO_LABEL
    return torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randn(VOCAB, WIDTH, dtype=dtype), labels


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z", [0.0, 0.03])
def test_equals_the_plain_loss(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, dtype: torch.dtype, z: float
) -> None:
    """With a z-loss the gradients are those of both, the value is the cross-entropy's."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", tokens_per_chunk * VOCAB)
    x, weight, labels = inputs(dtype)
    plain, fused = [(x.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    logits = F.linear(*plain).float()
    expected = F.cross_entropy(logits, labels, reduction="sum")
    squares = logits.logsumexp(-1)[labels != NO_LABEL].square().sum()
    actual = linear_cross_entropy_sum(*fused, labels, z_loss_coeff=z)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    ((expected + z * squares) / TOKENS).backward()
    (actual / TOKENS).backward()
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype == dtype
        assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels = inputs()
    value = linear_cross_entropy_sum(1e4 * x, weight, labels)
    torch.testing.assert_close(value, F.cross_entropy(1e4 * x @ weight.t(), labels, reduction="sum"))


def test_a_second_derivative_is_an_error_and_not_a_wrong_number() -> None:
    """What is saved are gradients: torch would take them for constants. The error's remedy has one."""
    x = torch.randn(3, 4, requires_grad=True)
    head, labels = LMHead(4, 6, bias=False), torch.tensor([0, 5, NO_LABEL])
    with pytest.raises(RuntimeError, match="LMHead without labels"):
        torch.autograd.grad(head(x[None], labels[None]), x, create_graph=True)
    plain = F.cross_entropy(head(x), labels, ignore_index=NO_LABEL, reduction="sum")
    (gradient,) = torch.autograd.grad(plain, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    assert second.abs().sum() > 0


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    x, weight, labels = inputs()
    with torch.no_grad():
        assert not linear_cross_entropy_sum(x.requires_grad_(), weight, labels).requires_grad
    linear_cross_entropy_sum(x, weight, labels).backward()
    assert x.grad is not None and weight.grad is None


class _Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab = 640, 50
    head = LMHead(4, vocab, bias=False)
    x, labels = torch.randn(2, tokens // 2, 4), torch.randint(0, vocab, (2, tokens // 2))

    def largest() -> int:
        with _Largest() as seen:
            head(x, labels).backward()
        return seen.elements

    assert largest() >= tokens * vocab  # one chunk is enough for so few
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 60 * vocab)
    assert largest() <= 60 * vocab


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    x, weight, labels = inputs()
    labels[3] = VOCAB
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy_sum(x, weight, labels)
