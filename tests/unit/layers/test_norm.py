"""Norms against their definitions; statistics in fp32 whatever the dtype."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus.config.schema import ModelConfig, Normalization
from megatron.optimus.layers.norm import NonparametricLayerNorm, RMSNorm, build_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_their_definitions(dtype: torch.dtype) -> None:
    x = (100 * torch.randn(3, 16)).to(dtype)
    norm = RMSNorm(16, 1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    exact = x.double()
    rms = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), rms, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-6)
    centred = exact - exact.mean(-1, keepdim=True)
    layer_norm = (centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(NonparametricLayerNorm(16, 1e-5)(x), layer_norm)


def test_the_option_chooses() -> None:
    sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=2)
    for choice, kind in (
        (Normalization.RMSNORM, RMSNorm),
        (Normalization.LAYERNORM_NONPARAMETRIC, NonparametricLayerNorm),
    ):
        assert isinstance(build_norm(ModelConfig(**sizes, normalization=choice)), kind)  # type: ignore[arg-type]
