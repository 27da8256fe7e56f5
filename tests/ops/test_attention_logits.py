"""The largest attention logit of each head on every backend, against every logit by itself in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.ops import attention_logits
from tests.ops.targets import ROUTER_TARGETS, each_target_and_dtype

SHAPES = {  # sequences, query heads, key heads, queries, head width
    "one query": (1, 1, 1, 1, 16),
    "shared keys": (2, 6, 2, 150, 24),
    "several tiles": (1, 4, 4, 300, 64),
    "wide": (1, 2, 1, 70, 192),
}


def plain(q: Tensor, k: Tensor, seen_BQK: Tensor) -> Tensor:
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.double() @ k.mT / math.sqrt(q.shape[-1])
    return logits.masked_fill(~seen_BQK[:, None], -math.inf).amax((0, 2, 3))


@each_target_and_dtype(ROUTER_TARGETS, [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["in order", "documents", "every second query"])
def test_values(
    backend: str, device: str, dtype: torch.dtype, shape: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops.set_backend(backend)
    monkeypatch.setattr(attention_logits, "MAX_SCORES", 50_000)  # several parts
    batch, heads, groups, length, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(length)
    q_BSHd, k_BSGd = (torch.randn(batch, length, number, width, generator=generator) for number in (heads, groups))
    if kind == "in order":  # below zero, where what is not there must not be taken for a zero
        q_BSHd, k_BSGd = q_BSHd.abs(), -k_BSGd.abs()
    q_BHSd, k_BGSd = (x.to(device, dtype).transpose(1, 2) for x in (q_BSHd, k_BSGd))
    positions = own = torch.arange(length, device=device)
    if kind == "every second query":
        own = positions[::2].contiguous()
        q_BHSd = q_BHSd[:, :, ::2]
    seen = positions <= own[:, None]
    seen_BQK = seen.expand(batch, *seen.shape)
    documents = []
    if kind == "documents":
        numbers = torch.randint(2, (batch, length), generator=generator).cumsum(1).to(device, torch.int32) // 20
        seen_BQK = seen & (numbers[:, :, None] == numbers[:, None])
        documents = [numbers, numbers]
    found = ops.largest_logits(q_BHSd, k_BGSd, own, positions, *documents)
    assert found.dtype == torch.float32
    error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), plain(q_BHSd, k_BGSd, seen_BQK), rtol=error, atol=error)


def test_a_head_without_queries_has_none() -> None:
    q, positions = torch.ones(2, 3, 0, 8), torch.arange(0)
    found = ops.largest_logits(q, q, positions, positions)
    assert torch.equal(found, torch.full((3,), -math.inf))


def test_what_does_not_fit_is_refused() -> None:
    q, k, positions = torch.ones(2, 3, 5, 8), torch.ones(2, 2, 5, 8), torch.arange(5)
    with pytest.raises(ValueError, match=r"queries torch.float32 \(2, 3, 5, 8\) and keys torch.float32 \(2, 2, 5, 8\)"):
        ops.largest_logits(q, k, positions, positions)
    with pytest.raises(ValueError, match="on cpu but another is on meta"):
        ops.largest_logits(q, q, positions.to("meta"), positions)
