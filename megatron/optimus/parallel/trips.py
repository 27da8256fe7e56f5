"""Trips: tokens on their way to experts, and the gradients of their rows on the way home, beside what is computed.

There: ``leave`` for x, as soon as it is known (some transports send it before the router has chosen), ``leave`` for the
weights of its choices, then ``arrive``. Each is a node of autograd, and between leaving and arriving only an empty
tensor is handed on: rows that have not come must not be seen by autograd.

Home: the backward of the experts tells ``Trip.go_home`` the gradients of the rows and weights before its last product,
so they travel beside it; what ``leave`` was applied to waits for them. Where nobody told (a device on which it does not
pay, a backend without halves, a computation other than experts) they leave when autograd brings them to where the rows
have arrived, as they are.

Every rank's backward makes the same trips in the same order: what starts one is the backward itself, not its timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.optimus.moe.dispatch import ExpertRows
from megatron.optimus.runtime import device as devices

End = Callable[[], Tensor]  # waits for a transfer, and gives what came

X, WEIGHTS = 0, 1  # what travels


class Trip:
    """One dispatch. A transport says how gradients go home.

    Nodes of autograd hold it, so it must hold none of their tensors: nothing would ever free them.
    """

    by_copies = False  # whether gradients go home by the device's copy engines, not in kernels of a collective library

    def __init__(self) -> None:
        self._gone: tuple[Tensor, Tensor] | None = None  # what the running backward has sent before autograd brings it
        self._ends: list[tuple[End, Any] | None] = [None, None]  # with what must live until it has been read

    def start_home(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[End, End]:
        """Queues the transfer of the gradients of all rows and their weights; what ends it gives those of own x [T, D]
        and weights [T, K]. Collective."""
        raise NotImplementedError

    def go_home(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Starts the way home."""
        self._gone = (dx_RD, dweights_RK)
        self._ends[:] = ((end, self._gone) for end in self.start_home(dx_RD, dweights_RK))

    def brought(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Sees to it that these gradients, all there are, have left. Raises RuntimeError where others have."""
        if self._gone is None:
            self.go_home(dx_RD, dweights_RK)
        elif any(_place(a) != _place(b) for a, b in zip(self._gone, (dx_RD, dweights_RK), strict=True)):
            raise RuntimeError(
                "rows that were dispatched to experts were used beside them, or a hook changed their gradient, which "
                "had left already; copy the rows first"
            )
        self._gone = None

    def come_home(self, what: int) -> Tensor:
        """The gradient of own x or weights; waits for it."""
        under_way, self._ends[what] = self._ends[what], None
        assert under_way is not None
        return under_way[0]()


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def leave(tensor: Tensor, trip: Trip, what: int) -> Tensor:
    """Ties own x or weights to the trip; ``arrive`` takes the result."""
    return _Leave.apply(tensor, trip, what)


def arrive(ties: tuple[Tensor, Tensor], trip: Trip, rows: ExpertRows) -> ExpertRows:
    """What has come, as autograd is to see it. ``ties``: of x and of weights."""
    x_RD, weights_RK = _Arrive.apply(*ties, trip, rows)
    is_beside = trip.by_copies or devices.hides_collectives(x_RD.device)
    return rows._replace(x_RD=x_RD, weights_RK=weights_RK, go_home=trip.go_home if is_beside else None)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trip: Trip, what: int) -> Tensor:
        ctx.trip, ctx.what = trip, what
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return ctx.trip.come_home(ctx.what), None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tie: Tensor, weights_tie: Tensor, trip: Trip, rows: ExpertRows) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        return rows.x_RD, rows.weights_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        ctx.trip.brought(*grads)
        return None, None, None, None
