"""The dense SwiGLU block, and the projections into and out of attention and MLP that tensor parallelism replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron.optimus import ops

ProjectIn = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]
ProjectOut = Callable[[Tensor, nn.Linear], Tensor]


def project_in(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Applies several layers to the same input: tensor parallelism communicates once for all of them.

    Args:
        x: [..., D].
        layers: first projections of a block.

    Returns:
        The output of each layer.
    """
    if torch.compiler.is_compiling() or not all(map(_is_product, layers)):
        return [layer(x) for layer in layers]
    call_pre_hooks(x, layers)
    return list(ops.linears(x, [layer.weight for layer in layers]))


def _is_product(layer: nn.Linear) -> bool:
    """Whether calling the layer multiplies by its weight and does nothing else."""
    after = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    is_hooked = bool(after or layer._forward_pre_hooks_with_kwargs)
    return type(layer) is nn.Linear and layer.bias is None and not is_hooked


def call_pre_hooks(x: Tensor, layers: Sequence[nn.Linear]) -> None:
    """Calls what waits for the weights of layers that are used without being called (the optimizer's gather).

    Raises:
        RuntimeError: a hook returns another input, which the layers do not share.
    """
    for layer in () if torch.compiler.is_compiling() else layers:
        for hook in [*layer._forward_pre_hooks.values()]:
            if hook(layer, (x,)) is not None:
                raise RuntimeError(
                    f"a forward pre-hook of one of {len(layers)} projections of the same input returned another input; "
                    "change it before the attention or MLP, in a hook of that module"
                )


def project_out(x: Tensor, layer: nn.Linear) -> Tensor:
    """Applies the last projection of a block: tensor parallelism may communicate while it computes."""
    return project_in(x, [layer])[0]


class MLP(nn.Module):
    """The SwiGLU MLP (arXiv 2002.05202), down(silu(gate(x)) * up(x)): [..., D] -> [..., D]."""

    def __init__(self, width: int, inner: int) -> None:
        """Makes the three projections.

        Args:
            width: D, the model width.
            inner: output width of gate and up.
        """
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.project_in: ProjectIn = project_in
        self.project_out: ProjectOut = project_out

    def forward(self, x: Tensor) -> Tensor:
        """Computes down(silu(gate(x)) * up(x)), [..., D] in the dtype of x."""
        gate, up = self.project_in(x, (self.gate_proj, self.up_proj))
        return self.project_out(ops.silu_mul(gate, up), self.down_proj)
