"""The dense SwiGLU block (arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.optimus import ops
from megatron.optimus.layers.linear import Project, ProjectOut, project, project_out


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
