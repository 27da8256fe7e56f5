"""No fused operation has a forward-mode derivative: asking for one is an error with the remedy, never a zero.

Where torch knows no such formula of an operation, it gives the results no tangent, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad


def carries_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD runs and one of these may have a tangent; elsewhere this costs one comparison."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and t.is_floating_point() and _may_be_dual(t) for t in tensors)


def refuse_tangents(operation: str, *tensors: Tensor | None) -> None:
    """Raises RuntimeError, with the remedy, where ``carries_tangent``."""
    if carries_tangent(*tensors):
        raise RuntimeError(
            f"{operation} has no forward-mode derivative: torch.func.jvp and torch.autograd.forward_ad through a fused "
            "kernel are not implemented; use the backend reference (ops.set_backend('reference')) without main "
            "gradients, or reverse mode"
        )


def reverse_mode_only(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same for the backward of an operation: a gradient that comes in may have a tangent where no input had one."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            refuse_tangents(f"the gradient of {operation}", *grads)
            return backward(ctx, *grads)

        return checked

    return decorate


def _may_be_dual(tensor: Tensor) -> bool:
    if is_functorch_wrapped_tensor(tensor):
        return True  # a tangent below another transform, as torch.func.hessian makes one, does not show from here
    with torch._C._DisableFuncTorch():
        return forward_ad.unpack_dual(tensor).tangent is not None
