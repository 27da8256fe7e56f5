"""What fused operations refuse of autograd, and what they do with tensors that hold no values.

No fused operation has a second derivative or a forward-mode derivative. Without the guards here torch would only warn,
or return gradients and tangents that lack what went through the operation. Asking for one is an error with the remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# Second derivatives


@functools.cache  # torch allows one registration for each name
def refuse_gradient(operation: str) -> None:
    """Makes a backward through ``operation`` (itself a gradient, "optimus::moe_mlp_backward") raise RuntimeError."""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _raise_no_derivative(operation)

    torch.library.register_autograd(operation, backward)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function: a derivative of its results raises RuntimeError.

    ``once_differentiable`` alone does not suffice: torch.autograd.grad skips its error node when no path leads from
    there to the leaves that were asked for.
    """
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
    """Returns its first ``count`` tensors, with a graph to the others whose backward raises."""

    @staticmethod
    def forward(ctx: Any, operation: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _raise_no_derivative(ctx.operation)


def _raise_no_derivative(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} has no derivative: second derivatives through a fused kernel are not implemented; "
        "use the backend reference (ops.set_backend('reference')), or create_graph=False"
    )


# Forward-mode derivatives


def carries_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD is active and one of the tensors may have a tangent. Costs one comparison otherwise."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and t.is_floating_point() and _may_be_dual(t) for t in tensors)


def refuse_tangents(operation: str, *tensors: Tensor | None) -> None:
    """Raises RuntimeError, with the remedy, where one of the tensors carries a tangent."""
    if carries_tangent(*tensors):
        raise RuntimeError(
            f"{operation} has no forward-mode derivative: torch.func.jvp and torch.autograd.forward_ad through a fused "
            "kernel are not implemented; use the backend reference (ops.set_backend('reference')) without main "
            "gradients, or reverse mode"
        )


def reverse_mode_only(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an operation's backward: incoming gradients that carry a tangent raise RuntimeError.

    A gradient may have a tangent although no input of the forward had one.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            refuse_tangents(f"the gradient of {operation}", *grads)
            return backward(ctx, *grads)

        return checked

    return decorate


def _may_be_dual(tensor: Tensor) -> bool:
    if is_functorch_wrapped_tensor(tensor):
        return True  # a tangent below another transform (torch.func.hessian) is not visible from here
    with torch._C._DisableFuncTorch():
        return forward_ad.unpack_dual(tensor).tangent is not None


# Tensors without values: on the meta device, FakeTensors, those of a compiler or a transform


def is_shape_only(tensor: Tensor) -> bool:
    """Whether results computed from this tensor need only have the right shapes.

    False while a compiler or tracer records: what it records from tensors without values runs on real ones later.
    """
    if torch.compiler.is_compiling():
        return False
    if type(tensor) is Tensor and not tensor.is_meta and not is_functorch_wrapped_tensor(tensor):
        return False  # the same answer as the next line's in a tenth of its time
    if not (tensor.is_meta or is_fake(tensor)):
        return False
    return get_proxy_mode() is None


def can_be_read(tensor: Tensor) -> bool:
    """Whether the host can read this tensor's numbers now.

    True for plain tensors, parameters and subclasses that only add to Tensor. False for fake tensors and other
    wrappers, functorch's (whose type is Tensor itself), and whatever a tracer sees.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or is_functorch_wrapped_tensor(tensor) or get_proxy_mode():
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
