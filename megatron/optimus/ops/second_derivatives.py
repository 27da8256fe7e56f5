"""No fused backward has a derivative of its own: asking for one is an error with the remedy, never a wrong number.

Without a formula torch only warns for an operation from C++, and hands out gradients that lack what went through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@functools.cache  # of one name: torch lets a formula be registered once
def refuse(operation: str) -> None:
    """Makes a backward through ``operation`` (a gradient's own, "optimus::moe_mlp_backward") raise RuntimeError."""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _raise(operation)

    torch.library.register_autograd(operation, backward)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the backward of an autograd.Function. Under ``once_differentiable`` alone torch.autograd.grad passes
    its error by: nothing leads from there to the leaves that were asked for."""
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return once(ctx, *grads)
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *grads)
        found = [t for t in results if t is not None]
        marked = iter(_Refused.apply(backward.__qualname__, len(found), *found, *sources) if sources else found)
        return tuple(None if t is None else next(marked) for t in results)

    return checked


class _Refused(torch.autograd.Function):
    """Its first ``count`` tensors, tied to the others."""

    @staticmethod
    def forward(ctx: Any, operation: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _raise(ctx.operation)


def _raise(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} has no derivative: second derivatives through a fused kernel are not implemented; "
        "use the backend reference (ops.set_backend('reference')), or create_graph=False"
    )
