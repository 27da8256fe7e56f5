"""How tokens reach the ranks that hold their experts, and how results come back.

One interface for every transport: ``dispatch`` turns this rank's tokens into the rows that this rank's experts must
see, with expert numbers local to this rank (-1 for choices that another rank serves); ``combine`` turns the experts'
answers for those rows into the outputs of this rank's own tokens. The expert computation between the two is the same
operation for all. Transports that communicate are in parallel/transport.py; here is the one that needs no other rank.

Shapes: T own tokens, R rows to compute here, D model width, K experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron.optimus.ops import Routing


class ExpertRows(NamedTuple):
    """Work for the experts of this rank."""

    x_RD: Tensor
    weights_RK: Tensor  # fp32
    indices_RK: Tensor  # expert number on this rank, or -1
    handle: Any  # what combine needs to find the way back


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows: ...

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...


class LocalDispatcher:
    """Every expert is on this rank: rows are tokens."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertRows:
        return ExpertRows(x_TD, routing.weights_TK, routing.indices_TK, None)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return y_RD
