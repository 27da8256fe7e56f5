"""Main gradients: buffers of the optimizer to which a backward adds a weight's gradient without an intermediate tensor.

The optimizer sets three attributes on a parameter:

- ``main_grad``: a buffer of the parameter's shape, in fp32 or the parameter's dtype.
- ``main_grad_holds_sum()``: called right before each gradient. True: add to the buffer. False: overwrite all of it,
  with zeros too. Without this method every gradient is added.
- ``main_grad_ready()``: called after each gradient.

Such a gradient is neither written in the weight's dtype, nor read again, nor rounded before the sum. Since the first
one overwrites the buffer, nothing has to zero it.

A backward uses a main gradient only where autograd would have accumulated into ``param.grad``. ``torch.autograd.grad``,
``backward(inputs=...)`` without the weight, and schedules that compute input gradients first and weight gradients later
(zero-bubble pipelines) get ordinary gradients and change no buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; what a GPU's tensor memory engine (TMA) asks of an address


class MainGrad(NamedTuple):
    """A weight's main gradient: its buffer and the two calls around each gradient."""

    buffer: Tensor  # of the weight's shape, contiguous, in fp32 or the weight's dtype
    ready: Callable[[], None]  # called after each gradient
    holds_sum: Callable[[], bool] = lambda: True  # called before each gradient: add to the buffer, or overwrite it


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """Returns the main gradient that an optimizer gave this parameter, or None where it cannot be used.

    None for a parameter without ``main_grad`` and ``main_grad_ready``, for one that is frozen or whose gradient passes
    through hooks (tensor parallelism sums some in hooks), for a buffer whose shape, strides, device, dtype or alignment
    does not fit, and in compiled graphs. The parameter then gets an ordinary gradient.
    """
    if torch.compiler.is_compiling():
        return None
    buffer, ready = getattr(weight, "main_grad", None), getattr(weight, "main_grad_ready", None)
    if buffer is None or ready is None or not weight.requires_grad or weight._backward_hooks:
        return None
    dtypes = (weight.dtype, torch.promote_types(weight.dtype, torch.float32))
    fits = buffer.shape == weight.shape and buffer.is_contiguous() and buffer.device == weight.device
    fits = fits and buffer.dtype in dtypes and buffer.data_ptr() % _ALIGNMENT == 0
    if not fits:
        return None
    holds_sum = getattr(weight, "main_grad_holds_sum", None)
    return MainGrad(buffer, ready) if holds_sum is None else MainGrad(buffer, ready, holds_sum)


def is_used(ctx: Any, position: int) -> bool:
    """Whether the running backward accumulates (leaf) or passes on the gradient of the argument at ``position``."""
    node = ctx.next_functions[position][0]
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns this leaf's gradient and accumulates nothing
        return False


def check_main_grad(operation: str, buffer: Tensor, weight: Tensor) -> None:
    """Raises ValueError for a buffer that cannot take the gradient of ``weight``."""
    if buffer.device != weight.device:
        raise ValueError(f"{operation}: main_grad is on {buffer.device} but its weight on {weight.device}")
    wide = torch.promote_types(weight.dtype, torch.float32)
    if buffer.shape != weight.shape or buffer.dtype not in (wide, weight.dtype) or not buffer.is_contiguous():
        raise ValueError(
            f"{operation}: main_grad {buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()}; expected "
            f"contiguous {tuple(weight.shape)} of {wide} or {weight.dtype}"
        )
    if buffer.requires_grad:
        raise ValueError(f"{operation}: main_grad requires a gradient itself; give the buffer detached")


def kernel_output(
    buffer: Tensor | None, accumulate: bool, shape: tuple[int, ...], *, is_padded: bool, adds_in_16_bits: bool = True
) -> tuple[Tensor | None, bool]:
    """The tensor that a kernel writes a weight's gradient to, and whether it adds to what is there.

    That is the buffer itself where the kernel can write there, else a new fp32 tensor, which ``store_gradient`` then
    puts into the buffer; None without a buffer.

    Args:
        buffer: the main gradient's buffer, if there is one.
        accumulate: whether the gradient is to be added to the buffer's contents.
        shape: of the kernel's result, with the padding of its widths.
        is_padded: whether that is more than the buffer's shape.
        adds_in_16_bits: whether the kernel can add to a buffer in 16 bits.
    """
    if buffer is None:
        return None, False
    can_add = adds_in_16_bits or buffer.dtype == torch.float32
    if not is_padded and (can_add or not accumulate):
        return buffer, accumulate
    return torch.empty(shape, dtype=torch.float32, device=buffer.device), False


def store_gradient(gradient: Tensor, output: Tensor | None, buffer: Tensor | None, accumulate: bool) -> Tensor | None:
    """Puts a gradient that a kernel wrote to ``output``, less its padding, into the buffer, unless it is there already.

    Returns the gradient where there is no buffer, else None.
    """
    if buffer is None:
        return gradient
    if output is not buffer:
        buffer.add_(gradient) if accumulate else buffer.copy_(gradient)
    return None
