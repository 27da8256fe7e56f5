"""Token dispatch and combine: how tokens reach the ranks that hold their experts, and how results come back.

One interface for every transport: ``start`` sends what can leave before the router has chosen; ``dispatch`` turns this
rank's tokens into the rows that this rank's experts must see, with expert numbers local to this rank (-1 for choices
that another rank serves); ``combine`` turns the experts' outputs for those rows into the outputs of this rank's own
tokens. The expert computation between the two is the same operation for all. What else the layer computes with its
tokens (shared experts) is ``overlapped``: ``dispatch`` calls it once, when it has sent what it can and before it waits.
Its nodes of autograd then lie between those of sending and of receiving, so the backward, too, runs it while gradients
are combined. Dispatchers that communicate are in moe/dispatch/collective.py; here is the one that needs no other rank.

Shapes: T own tokens, R rows to compute here, D model width, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron.optimus.ops import InputGradients, Routing

OverlappedWork = Callable[[], None]


def no_work() -> None:
    """The ``OverlappedWork`` of a layer that has nothing else to compute."""


class ExpertRows(NamedTuple):
    """Work for the experts of this rank."""

    x_RD: Tensor
    weights_RK: Tensor  # fp32; those of other ranks' choices may be anything finite and must get a gradient of zero
    indices_RK: Tensor  # int32 or int64: expert number on this rank, or -1
    handle: Any  # what combine needs
    # Combines the gradients of x_RD and weights_RK, for a backward to call as soon as it has them; one that does not
    # is as right, and hides nothing. None where they had better travel after the whole backward.
    on_input_gradients: InputGradients | None = None


class TokenDispatcher(Protocol):
    def start(self, x_TD: Tensor) -> Any:
        """Sends tokens before the router sees them; what it returns goes to ``dispatch``. None: nothing has left."""

    def dispatch(
        self, x_TD: Tensor, routing: Routing, started: Any, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        """``x_TD``: the tokens as the router hands them on, so that both have one gradient (``ops.route``)."""

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...


# From tokens, their routes and what ``TokenDispatcher.start`` gave, to what their experts make of them: [T, D], and the
# slots that were worked on here.
ExpertPass = Callable[[TokenDispatcher, nn.Module, Tensor, Routing, Any, OverlappedWork], tuple[Tensor, Tensor]]


def expert_pass(
    dispatcher: TokenDispatcher,
    experts: nn.Module,
    x_TD: Tensor,
    routing: Routing,
    started: Any,
    overlapped: OverlappedWork,
) -> tuple[Tensor, Tensor]:
    """Dispatch, experts, combine: all tokens at once."""
    rows = dispatcher.dispatch(x_TD, routing, started, overlapped)
    y_RD = experts(rows.x_RD, rows.weights_RK, rows.indices_RK, rows.on_input_gradients)
    return dispatcher.combine(y_RD, rows.handle), (rows.indices_RK >= 0).sum()


class LocalDispatcher:
    """Every expert is on this rank: rows are tokens."""

    def start(self, x_TD: Tensor) -> None:
        return None

    def dispatch(
        self, x_TD: Tensor, routing: Routing, started: None, overlapped: OverlappedWork = no_work
    ) -> ExpertRows:
        overlapped()
        return ExpertRows(x_TD, routing.weights_TK, routing.indices_TK, None)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return y_RD
