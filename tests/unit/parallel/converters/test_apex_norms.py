"""The decoder's norms as apex's: the same values and gradients under the same names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus.config.choices import Normalization
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.layers.norm import build_norm
from megatron.optimus.parallel.converters import apex_norms
from tests.apex_stand_in import installed


class _Tiny(torch.nn.Module):
    """What the converter walks: a final norm, and layers with two norms each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.final_norm = build_norm(config)
        layer = torch.nn.ModuleDict({"attention_norm": build_norm(config), "mlp_norm": build_norm(config)})
        self.layers = torch.nn.ModuleList([layer])


@pytest.mark.parametrize("kind", list(Normalization))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_ours_in_values_and_gradients(kind: Normalization, dtype: torch.dtype) -> None:
    config = ModelConfig(num_layers=1, hidden_size=48, num_attention_heads=4, normalization=kind, norm_epsilon=1e-3)
    own, fused = _Tiny(config).to(dtype), _Tiny(config).to(dtype)
    with installed() as calls:
        apex_norms.convert(fused)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(3, 5, 48, generator=generator).to(dtype)
        weight = torch.rand(48, generator=generator).to(dtype)
        out, expected = _run(fused, x, weight), _run(own, x, weight)
        assert len(calls) == 3
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in fused.named_parameters()]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(expected, out, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)


def _run(model: torch.nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.data.copy_(weight)
    y = x
    for norm in (*model.layers[0].values(), model.final_norm):  # type: ignore[union-attr, index, operator]
        y = norm(y)
    (y.float() * torch.arange(48.0).cos()).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]
