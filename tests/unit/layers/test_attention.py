"""Core attention against its definition, and what the projections' outputs pass through before it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimus.config.schema import ModelConfig, QKNormScope
from megatron.optimus.layers.attention import Attention, causal_attention
from megatron.optimus.layers.rope import rope_table


@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_causal_attention_equals_its_definition(num_groups: int) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, num_groups, num_groups))
    out = causal_attention(q, k, v, None)
    k, v = (x.repeat_interleave(4 // num_groups, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("scope", list(QKNormScope))
def test_heads_are_normed_in_the_scope_asked_for_then_clipped(scope: QKNormScope) -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, qk_layernorm=True, qk_layernorm_scope=scope, clip_qkv=0.9
    )
    layer, seen = Attention(config), []

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: None) -> torch.Tensor:
        seen.append((q, v))
        return v

    layer.core_attention = core  # type: ignore[assignment]
    x = 5 * torch.randn(1, 1, 16)  # position 0, which RoPE does not rotate
    layer(x, rope_table(1, config, x.device))
    [(q_BHSd, v_BHSd)] = seen
    heads = layer.q_proj(x).view(2, 8)
    mean = heads.square().mean(-1, keepdim=True) if scope is QKNormScope.HEAD else heads.square().mean()
    expected = (heads / torch.sqrt(mean + config.norm_epsilon)).clamp(-0.9, 0.9)
    torch.testing.assert_close(q_BHSd[0, :, 0], expected)
    torch.testing.assert_close(v_BHSd[0, :, 0], layer.v_proj(x).view(2, 8).clamp(-0.9, 0.9))
