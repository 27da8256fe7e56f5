"""The dense SwiGLU block (arXiv 2002.05202), and the projections at the ends of attention and MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from megatron.optimus import ops

Project = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]
ProjectOut = Callable[[Tensor, nn.Linear], Tensor]


def project(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Each layer's output for x. Tensor parallelism puts a function here that communicates once for all of them."""
    return [layer(x) for layer in layers]


def project_out(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's output for x. Tensor parallelism may put a function here that communicates meanwhile."""
    return layer(x)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [..., D] -> [..., D]."""

    def __init__(self, width: int, inner: int) -> None:
        """``width``: D, ``inner``: of gate and up."""
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.project: Project = project
        self.project_out: ProjectOut = project_out

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, (self.gate_proj, self.up_proj))
        return self.project_out(ops.silu_mul(gate, up), self.down_proj)
