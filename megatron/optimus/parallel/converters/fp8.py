"""The converter of ``--fp8 hybrid``: projections of attention, dense MLPs and experts multiply in float8 (ops/fp8.py).

Embedding, norms, router, output projection and loss stay as they are, and parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.optimus.config.values import ConfigError
from megatron.optimus.layers.attention import Attention
from megatron.optimus.layers.mlp import MLP, call_pre_hooks
from megatron.optimus.models.decoder import Decoder
from megatron.optimus.moe.experts import Experts
from megatron.optimus.ops import fp8, fp8_experts


class Float8MLP(MLP):
    """The SwiGLU MLP with float8 products."""

    def forward(self, x: Tensor) -> Tensor:
        call_pre_hooks(x, (self.gate_proj, self.up_proj, self.down_proj))
        return fp8.mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


def convert(model: Decoder) -> None:
    """Makes every attention, MLP and layer of experts of the serial model multiply in float8.

    Raises:
        ConfigError: a width is no multiple of 16.
    """
    for name, module in model.layers.named_modules():
        _check_widths(name, module)
        if isinstance(module, Attention):
            module.project_in, module.project_out = _project_in, _project_out
        elif type(module) is MLP:
            module.__class__ = Float8MLP
        elif isinstance(module, Experts):
            module.moe_mlp = fp8_experts.moe_mlp


def _project_in(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    call_pre_hooks(x, layers)
    outputs = fp8.linear(x, [layer.weight for layer in layers])
    return [y if layer.bias is None else y + layer.bias for y, layer in zip(outputs, layers, strict=True)]


def _project_out(x: Tensor, layer: nn.Linear) -> Tensor:
    return _project_in(x, [layer])[0]


def _check_widths(name: str, module: nn.Module) -> None:
    """Raises ConfigError for a projection or experts whose widths the products do not take."""
    weights: dict[str, Tensor] = {}
    if isinstance(module, (Attention, MLP)):
        layers = [(part, layer) for part, layer in module.named_children() if isinstance(layer, nn.Linear)]
        weights = {part: layer.weight for part, layer in layers}
    elif isinstance(module, Experts):
        weights = {"down_weight": module.down_weight}
    for part, weight in weights.items():
        if weight.shape[-1] % fp8.ALIGNMENT or weight.shape[-2] % fp8.ALIGNMENT:
            raise ConfigError(
                f"fp8=hybrid needs widths that are multiples of {fp8.ALIGNMENT}; layers.{name}.{part} is "
                f"{weight.shape[-2]} x {weight.shape[-1]}"
            )
