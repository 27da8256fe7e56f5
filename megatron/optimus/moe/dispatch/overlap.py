"""Asynchronous dispatch: tokens travel to experts, and the gradients of their rows back, beside what is computed.

Forward: ``begin_dispatch`` for x, as soon as it is known (some transports send it before the router has chosen), and
for the weights of its choices, then ``finish_dispatch``. Each is a node of autograd. Between the two only an empty
tensor, a link, is handed on: rows that have not come must not be seen by autograd.

Backward: the gradients of the rows are combined, as outputs of experts are in the forward. The backward of the experts
hands the gradients of rows and weights to ``AsyncDispatch.combine_grads`` before its last product, so they travel
beside it; the backward of ``begin_dispatch`` waits for them. Where it does not (a device on which that does not pay, a
backend without halves, a computation other than experts) they are sent, as they are, when autograd reaches
``finish_dispatch``.

Every rank's backward makes the same exchanges in the same order: what starts one is the backward itself, not its
timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.optimus.moe.dispatch.base import ExpertRows
from megatron.optimus.platform import device as devices

Wait = Callable[[], Tensor]  # waits for a transfer, and gives what came

X, WEIGHTS = 0, 1  # what travels


class AsyncDispatch:
    """One dispatch and the combine of its gradients, for which each transport has its own way.

    Nodes of autograd hold it, so it must hold none of their tensors: nothing would ever free them.
    """

    by_copies = False  # whether gradients travel by the device's copy engines, not in kernels of a collective library

    def __init__(self) -> None:
        # What the running backward has sent before autograd reaches ``finish_dispatch``.
        self._sent_grads: tuple[Tensor, Tensor] | None = None
        self._waits: list[tuple[Wait, Any] | None] = [None, None]  # with what must live until it has been read

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        """Queues the transfer of the gradients of all rows and their weights; the waits give those of own x [T, D] and
        weights [T, K]. Collective."""
        raise NotImplementedError

    def combine_grads(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Sends the gradients of all rows and their weights, before autograd needs them."""
        self._sent_grads = (dx_RD, dweights_RK)
        self._waits[:] = ((wait, self._sent_grads) for wait in self.start_grad_combine(dx_RD, dweights_RK))

    def ensure_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Sends these gradients, all there are, unless that is done. Raises RuntimeError where others were sent."""
        if self._sent_grads is None:
            self.combine_grads(dx_RD, dweights_RK)
        elif any(_place(a) != _place(b) for a, b in zip(self._sent_grads, (dx_RD, dweights_RK), strict=True)):
            raise RuntimeError(
                "rows that were dispatched to experts were used beside them, or a hook changed their gradient, which "
                "had left already; copy the rows first"
            )
        self._sent_grads = None

    def wait_grad(self, what: int) -> Tensor:
        """The gradient of own x or weights; waits for it."""
        started, self._waits[what] = self._waits[what], None
        assert started is not None
        wait, _ = started
        return wait()


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def begin_dispatch(tensor: Tensor, pending: AsyncDispatch, what: int) -> Tensor:
    """The link of own x or weights, which ``finish_dispatch`` takes."""
    return _BeginDispatch.apply(tensor, pending, what)


def finish_dispatch(links: tuple[Tensor, Tensor], pending: AsyncDispatch, rows: ExpertRows) -> ExpertRows:
    """The rows that came, as autograd is to see them. ``links``: of x and of weights."""
    x_RD, weights_RK = _FinishDispatch.apply(*links, pending, rows)
    is_beside = pending.by_copies or devices.overlaps_collectives(x_RD.device)
    combine_grads = pending.combine_grads if is_beside else None
    return rows._replace(x_RD=x_RD, weights_RK=weights_RK, on_input_gradients=combine_grads)


class _BeginDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pending: AsyncDispatch, what: int) -> Tensor:
        ctx.pending, ctx.what = pending, what
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return ctx.pending.wait_grad(ctx.what), None, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_link: Tensor, weights_link: Tensor, pending: AsyncDispatch, rows: ExpertRows
    ) -> tuple[Tensor, Tensor]:
        ctx.pending = pending
        return rows.x_RD, rows.weights_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        ctx.pending.ensure_grad_combine(*grads)
        return None, None, None, None
