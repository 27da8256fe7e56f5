"""Several projections of the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Project = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]


def project(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Each layer's output for x. Tensor parallelism puts a function here that communicates once for all of them."""
    return [layer(x) for layer in layers]
