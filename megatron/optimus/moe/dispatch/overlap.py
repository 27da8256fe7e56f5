"""Overlap of the tokens' exchange with computation, in forward and backward; the parts that dispatchers share.

Forward: ``begin_dispatch`` for x as soon as it is known and for the weights of its choices, then ``finish_dispatch``.
Each is a node of autograd. Between the two only an empty tensor, the link, is passed on: autograd must not see rows
that have not arrived.

Backward: gradients of the rows are combined as outputs of experts are in the forward. The experts' backward passes the
gradients of rows and weights to ``AsyncDispatch.combine_grads`` before its last product, so that they travel beside it;
the backward of ``begin_dispatch`` waits for them. Where the experts do not call it (a device on which it does not pay,
a backend without halves, a computation other than experts), they are sent when autograd reaches ``finish_dispatch``.
Every rank's backward makes the same exchanges in the same order, since the backward itself starts them, not its timing.

Shapes: T own tokens, R rows to compute here, D model width, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.optimus.moe.dispatch.base import ExpertRows
from megatron.optimus.moe.dispatch.ownership import Ownership
from megatron.optimus.ops import Routing
from megatron.optimus.platform import device as devices

Wait = Callable[[], Tensor]  # waits for a transfer and returns what was received

X, WEIGHTS = 0, 1  # which of the two tensors of a dispatch


def pack_choices(routing: Routing) -> Tensor:
    """Weights and expert numbers of each token side by side, so that one message has both: fp32 [T, 2K].

    The numbers are int32 in the bits of fp32, so the result is for moving and copying only. A token takes its choices
    along as they are; the receiver picks those that it serves. The gradients of a token and of its weights, zero for
    choices served elsewhere, are then both the sum over the token's copies.
    """
    return torch.cat((routing.weights_TK.detach(), routing.indices_TK.to(torch.int32).view(torch.float32)), dim=1)


def expert_numbers(choices_R2K: Tensor) -> Tensor:
    """The numbers of experts in the model in the result of ``pack_choices``: int32 [R, K]."""
    return choices_R2K[:, choices_R2K.shape[1] // 2 :].view(torch.int32)


def rows_for(ownership: Ownership, rank: int, x_RD: Tensor, choices_R2K: Tensor, handle: object) -> ExpertRows:
    """The rows received, with choices as the experts of ``rank`` (of ``ownership.num_ranks``) number them."""
    topk = choices_R2K.shape[1] // 2
    indices_RK = ownership.local_ids(rank, x_RD.device)[expert_numbers(choices_R2K)]
    return ExpertRows(x_RD, choices_R2K[:, :topk].contiguous(), indices_RK, handle)


class AsyncDispatch:
    """One dispatch and the combine of its gradients; each dispatcher derives its own.

    Nodes of autograd hold it, so it must not hold their tensors: nothing would ever free them.
    """

    uses_copy_engines = False  # gradients travel by the device's copy engines, not in kernels of a collective library

    def __init__(self) -> None:
        self._sent_grads: tuple[Tensor, Tensor] | None = None  # sent before autograd reached ``finish_dispatch``
        self._waits: list[tuple[Wait, Any] | None] = [None, None]  # with the tensors that must live until then

    def start_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> tuple[Wait, Wait]:
        """Queues the transfer of the gradients of all rows and their weights. Collective.

        Returns:
            Waits for the gradients of own x [T, D] and own weights [T, K].
        """
        raise NotImplementedError

    def combine_grads(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Sends the gradients of all rows and their weights, before autograd needs them."""
        self._sent_grads = (dx_RD, dweights_RK)
        self._waits[:] = ((wait, self._sent_grads) for wait in self.start_grad_combine(dx_RD, dweights_RK))

    def ensure_grad_combine(self, dx_RD: Tensor, dweights_RK: Tensor) -> None:
        """Sends these complete gradients unless ``combine_grads`` did.

        Raises:
            RuntimeError: where ``combine_grads`` sent others.
        """
        if self._sent_grads is None:
            self.combine_grads(dx_RD, dweights_RK)
        elif any(_storage(a) != _storage(b) for a, b in zip(self._sent_grads, (dx_RD, dweights_RK), strict=True)):
            raise RuntimeError(
                "rows that were dispatched to experts were used beside them, or a hook changed their gradient, which "
                "had left already; copy the rows first"
            )
        self._sent_grads = None

    def wait_grad(self, what: int) -> Tensor:
        """Waits for the gradient of own x or weights and returns it."""
        started, self._waits[what] = self._waits[what], None
        assert started is not None
        wait, _ = started
        return wait()


def _storage(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def begin_dispatch(tensor: Tensor, pending: AsyncDispatch, what: int) -> Tensor:
    """The link of own x or weights, which ``finish_dispatch`` takes."""
    return _BeginDispatch.apply(tensor, pending, what)


def finish_dispatch(links: tuple[Tensor, Tensor], pending: AsyncDispatch, rows: ExpertRows) -> ExpertRows:
    """Connects the received rows to autograd.

    Args:
        links: those of x and of weights.
        pending: the exchange that brought the rows.
        rows: the rows, detached.
    """
    x_RD, weights_RK = _FinishDispatch.apply(*links, pending, rows)
    overlaps = pending.uses_copy_engines or devices.overlaps_collectives(x_RD.device)
    combine_grads = pending.combine_grads if overlaps else None
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
