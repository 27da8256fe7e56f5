"""The backward of the expert layer, where it is more than a formula: weight gradients that are summed where the
optimizer keeps them, and input gradients that are handed out before the last product.

Main gradients. The optimizer's side is three attributes of a parameter: ``main_grad``, a buffer of its shape in fp32 or
its own dtype; ``main_grad_holds_sum()``, asked right before each gradient: True, add to what is there, False, write
over it, zeros too; and ``main_grad_ready()``, called after each gradient. Without the question all is added. A gradient
that takes this way is neither written in the weight's dtype, read again, nor rounded before the sum, and where the
first one is written nobody need zero the buffer.

A backward does so only where autograd would have accumulated into ``param.grad``. ``torch.autograd.grad`` and
``backward(inputs=...)`` without the weight change no buffer, and neither does a schedule that takes a stage's input
gradients first and its weights' later (zero-bubble pipelines): those get their gradients the ordinary way.

Two halves. The gradient of gate_up needs a product, a quarter to a third of the backward, that gives nothing else. It
comes last, so that whoever has to send the other gradients over the network can do so beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.forward_mode import reverse_mode_only
from megatron.optimus.ops.second_derivatives import first_derivative_only
from megatron.optimus.ops.shapes_only import lacks_values

_ALIGNMENT = 16  # bytes; what a GPU's tensor memory engine asks of an address


class MainGrad(NamedTuple):
    """Where a weight's gradient is summed."""

    buffer: Tensor  # of the weight's shape, contiguous, in fp32 or the weight's dtype
    ready: Callable[[], None]  # called after each gradient
    holds_sum: Callable[[], bool] = lambda: True  # before each gradient: whether it is added to the buffer's contents


InputGradients = Callable[[Tensor, Tensor], None]  # is called with dx [T, D] and dweights [T, K]


class FusedMoE(Protocol):
    """What a backend offers so that its expert layer can add to main gradients: a forward and the two halves of its
    backward, or a whole one ``moe_mlp_backward(dy, arguments, saved, buffers, accumulate)`` that returns the gradients
    of x, gate_up, down and weights, or both, where the whole one is faster: it is used where nobody asks for input
    gradients early. Its ``buffers`` and ``accumulate`` are pairs, for gate_up and down.

    ``arguments`` are those of the forward, ``saved`` what it has kept besides. The gradient of a weight with a buffer
    is added to the buffer, in at least fp32 and rounded at most once, and None is returned in its place. Without
    ``accumulate`` the whole buffer is written, to the same bits as if it had been zero: zeros for an expert without
    tokens, whatever was there.
    """

    def moe_mlp_forward(
        self, x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
    ) -> tuple[Tensor, list[Tensor]]: ...

    def moe_mlp_backward_inputs(
        self,
        dy_TD: Tensor,
        arguments: list[Tensor],
        saved: list[Tensor],
        down_buffer: Tensor | None,
        accumulate: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Any]:
        """dx, ddown, dweights, all of them complete in the current stream, and what the other half needs."""

    def moe_mlp_backward_up_weights(
        self,
        arguments: list[Tensor],
        saved: list[Tensor],
        pending: Any,
        gate_up_buffer: Tensor | None,
        accumulate: bool,
    ) -> Tensor | None:
        """dgate_up, by one product."""


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """The place that an optimizer gave this parameter for its gradient; None where the ordinary way is due.

    The ordinary way also serves weights whose gradients pass through hooks, as tensor parallelism sums some, and
    compiled graphs.
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


def moe_mlp(
    backend: FusedMoE,
    arguments: tuple[Tensor, ...],
    main_grads: tuple[MainGrad | None, MainGrad | None],
    on_input_gradients: InputGradients | None,
) -> Tensor:
    """The backend's ``moe_mlp`` whose backward adds the gradients of gate_up and down to ``main_grads``, and calls
    ``on_input_gradients`` with those of x and weights before its last product."""
    y: Tensor = _MoeMlp.apply(*arguments, backend, main_grads, on_input_gradients)
    return y


def keep_for_backward(ctx: Any, arguments: Sequence[Tensor], besides: Sequence[Tensor]) -> None:
    """Sets up the autograd of a backend's own ``moe_mlp``: saves arguments and what it returns beside y."""
    ctx.save_for_backward(*arguments, *besides)
    ctx.mark_non_differentiable(*besides)
    ctx.set_materialize_grads(False)  # else autograd fills gradients of what is beside y with zeros


class _MoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *arguments, ctx.backend, ctx.main_grads, ctx.on_input_gradients = inputs
        y, saved = ctx.backend.moe_mlp_forward(*arguments)
        ctx.save_for_backward(*arguments, *saved)
        return y

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("moe_mlp")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: a checkpoint gives them out a single time
        gate_up, down = (
            main_grad if main_grad is not None and _is_used(ctx, position) else None
            for position, main_grad in zip((1, 2), ctx.main_grads, strict=True)
        )
        into = (
            (None if gate_up is None else gate_up.buffer, None if down is None else down.buffer),
            (gate_up is not None and gate_up.holds_sum(), down is not None and down.holds_sum()),
        )
        # A backward that is asked for the weights alone sends nothing: nobody would wait for it.
        on_input_gradients = ctx.on_input_gradients if _is_used(ctx, 0) else None
        gradients = _gradients(ctx.backend, grads[0], list(tensors[:5]), list(tensors[5:]), into, on_input_gradients)
        for main_grad in (gate_up, down):
            if main_grad is not None:
                main_grad.ready()
        return *gradients, None, None, None, None


def _gradients(
    backend: Any,
    dy: Tensor,
    arguments: list[Tensor],
    saved: list[Tensor],
    into: tuple[tuple[Tensor | None, Tensor | None], tuple[bool, bool]],
    on_input_gradients: InputGradients | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Of x, gate_up, down and weights. ``into``: buffers, and whether they are added to. Here alone is known which
    backends have two halves, a whole, or both."""
    if lacks_values(dy):
        backend = reference  # for shapes: some kernels of these backwards are no operations of torch
    has_whole, has_halves = (hasattr(backend, f"moe_mlp_backward{half}") for half in ("", "_inputs"))
    if has_whole and (on_input_gradients is None or not has_halves):
        dx, dgate_up, ddown, dweights = backend.moe_mlp_backward(dy, arguments, saved, *into)
        if on_input_gradients is not None:
            on_input_gradients(dx, dweights)
        return dx, dgate_up, ddown, dweights
    buffers, accumulate = into
    dx, ddown, dweights, pending = backend.moe_mlp_backward_inputs(dy, arguments, saved, buffers[1], accumulate[1])
    if on_input_gradients is not None:
        on_input_gradients(dx, dweights)
    dgate_up = backend.moe_mlp_backward_up_weights(arguments, saved, pending, buffers[0], accumulate[0])
    return dx, dgate_up, ddown, dweights


def _is_used(ctx: Any, position: int) -> bool:
    """Whether the running backward does something with the gradient of the argument at ``position``: accumulates it
    where that is a leaf, else hands it on."""
    node = ctx.next_functions[position][0]
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns this leaf's gradient and accumulates nothing
        return False
