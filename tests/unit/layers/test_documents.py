"""Attention inside documents: against a mask, against the documents one by one, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.layers import documents as module
from megatron.optimus.layers.documents import Documents, document_attention
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.models.initialize import initialize_weights

STARTS = [[3, 4, 11], [0, 7], []]  # of three rows of 16 tokens: four, two and one document
LENGTH = 16


def heads(num_heads: int, num_groups: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3, n, LENGTH, 8) for n in (num_heads, num_groups, num_groups)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The specification: a mask of S x S for each row."""
    number_BS = torch.zeros(3, LENGTH, dtype=torch.long)
    for row, starts in enumerate(STARTS):
        number_BS[row, [s for s in starts if s]] = 1
    number_BS = number_BS.cumsum(1)
    same = number_BS[:, :, None] == number_BS[:, None, :]
    mask = (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None].to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def gradients(function: Any, inputs: list[Tensor], *extra: Any) -> list[Tensor]:
    out = function(*inputs, *extra)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_equals_a_mask(num_groups: int) -> None:
    inputs = heads(4, num_groups)
    ours = gradients(document_attention, inputs, Documents.from_starts(STARTS, LENGTH))
    for a, b in zip(ours, gradients(masked, inputs), strict=True):
        torch.testing.assert_close(a, b)


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What torch's varlen_attn promises, in its layout [tokens, heads, width]."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and max_q == max_k == 16
    assert options.pop("window_size", None) == (-1, 0) or options.pop("is_causal", False)
    grouped = options.pop("enable_gqa", False)
    assert not options and grouped == (q.shape[1] != k.shape[1])
    pieces = []
    for start, stop in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        own = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        pieces.append(F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.skipif(not module._has_varlen(), reason="this torch has no such kernel")
@pytest.mark.parametrize("with_groups", [True, False])  # torch 2.10's kernel takes as many key as query heads
@pytest.mark.parametrize("num_groups", [4, 2])
def test_layout_of_the_fused_call(num_groups: int, with_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = module._varlen()[1]
    parameters = parameters | {"enable_gqa"} if with_groups else parameters - {"enable_gqa"}
    monkeypatch.setattr(module, "_varlen", lambda: (stand_in, parameters))
    inputs = heads(4, num_groups)
    for a, b in zip(
        gradients(module._fused, inputs, Documents.from_starts(STARTS, LENGTH)), gradients(masked, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_groups", [4, 2])
def test_fused_on_a_device(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents.from_starts(STARTS, LENGTH).to(torch.device("cuda"))
    inputs = [x.detach().cuda().requires_grad_() for x in heads(4, num_groups, torch.bfloat16)]
    called: list[int] = []
    fused = module._fused
    monkeypatch.setattr(module, "_fused", lambda *args: (called.append(1), fused(*args))[1])
    ours = gradients(document_attention, inputs, documents)
    assert called
    for a, b in zip(ours, gradients(masked, [x.detach().float().requires_grad_() for x in inputs]), strict=True):
        torch.testing.assert_close(a.float(), b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("width", "dtype", "is_fused"),
    [
        (64, torch.bfloat16, True),
        (256, torch.float16, True),
        (64, torch.float32, False),
        (36, torch.bfloat16, False),
        (264, torch.bfloat16, False),
    ],
)
def test_the_fused_kernel_gets_what_it_takes(
    width: int, dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses heads whose width is no multiple of 8 or beyond 256. Tensors of a pretended device."""
    monkeypatch.setattr(module, "_fused", lambda *args: True)
    monkeypatch.setattr(module, "_one_by_one", lambda *args: False)
    monkeypatch.setattr(module, "_has_varlen", lambda: True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, width, dtype=dtype, device="cuda")
    assert document_attention(q, q, q, Documents.from_starts([[3]], 8)) is is_fused


def test_cost_is_the_sum_of_squares() -> None:
    def flops(starts: list[int], length: int) -> int:
        q = torch.randn(1, 2, length, 8)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # its products are counted
            document_attention(q, q, q, Documents.from_starts([starts], length))
        return counter.get_total_flops()

    whole, halves, eighths = flops([], 64), flops([32], 64), flops(list(range(0, 64, 8)), 64)
    assert whole == 2 * halves == 8 * eighths > 0


def test_documents_must_be_those_of_the_batch() -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="end at token 16, the batch has 1 x 8"):
        document_attention(q, q, q, Documents.from_starts([[], []], 8))


@pytest.mark.parametrize("changes", [{}, {"num_query_groups": 2}, {"num_experts": 5, "moe_router_topk": 2}])
def test_packed_documents_equal_documents_one_by_one(changes: dict[str, int]) -> None:
    """Logits, loss and the gradient of every parameter; a row of three documents and one of two."""
    torch.manual_seed(0)
    widths = dict(hidden_size=32, num_attention_heads=4, ffn_hidden_size=40, moe_ffn_hidden_size=24)
    model = Decoder(ModelConfig(num_layers=2, vocab_size=50, init_method_std=0.2, **widths, **changes))
    initialize_weights(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    tokens_BS, labels_BS = torch.randint(50, (2, 20)), torch.randint(50, (2, 20))
    starts = [[5, 6], [13]]
    pieces = [(0, 0, 5), (0, 5, 6), (0, 6, 20), (1, 0, 13), (1, 13, 20)]
    positions_BS = torch.cat([torch.arange(b - a) for _, a, b in pieces]).view(2, 20)

    def run(tokens: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        loss = model(tokens, labels, *others).loss_sum
        loss.backward()  # adds to the gradients
        return model(tokens, None, *others).logits_BSV.detach(), loss.detach()

    logits, loss = run(tokens_BS, labels_BS, Documents.from_starts(starts, 20), positions_BS)
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = [run(tokens_BS[r : r + 1, a:b], labels_BS[r : r + 1, a:b]) for r, a, b in pieces]
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat([one[0][0] for one in alone]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, sum(one[1] for one in alone), atol=1e-4, rtol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=2e-5, rtol=1e-4, msg=name)
    without = model(tokens_BS).logits_BSV
    assert (without - logits).abs().max() > 1e-2  # so the mask does something
    moved = model(tokens_BS, None, None, positions_BS).logits_BSV
    assert (moved - without)[0, 6:].abs().max() > 1e-3  # and so do positions
