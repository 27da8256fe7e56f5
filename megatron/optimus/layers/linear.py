"""The projections at the ends of attention and MLP: several of the same input, and the one of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Project = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]
ProjectOut = Callable[[Tensor, nn.Linear], Tensor]


def project(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Each layer's output for x. Tensor parallelism puts a function here that communicates once for all of them."""
    return [layer(x) for layer in layers]


def project_out(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer's output for x. Tensor parallelism may put a function here that communicates meanwhile."""
    return layer(x)
