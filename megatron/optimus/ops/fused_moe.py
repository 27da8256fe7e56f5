"""``moe_mlp``: all SwiGLU experts of a layer as one operation, its autograd, and what a backend provides for it.

Autograd comes in two forms. A backend registers its kernels as an operation of torch (``register_moe_mlp``): that form
compiles and gives every gradient as usual. Main gradients and early input gradients need Python in the backward: the
autograd function ``MoeMlpFunction`` here, which the compiler does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import (
    first_derivative_only,
    is_shape_only,
    refuse_gradient,
    refuse_tangents,
    reverse_mode_only,
)
from megatron.optimus.ops.backend import Backend, kernels, resolve
from megatron.optimus.ops.main_grads import MainGrad, check_main_grad, is_used
from megatron.optimus.ops.router import check_values

InputGradients = Callable[[Tensor, Tensor], None]  # is called with dx [T, D] and dweights [T, K]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    main_grads: tuple[MainGrad | None, MainGrad | None] = (None, None),
    on_input_gradients: InputGradients | None = None,
) -> Tensor:
    """Runs all SwiGLU experts of a layer on all their tokens: y[t] = sum_k weights[t,k] * expert_{indices[t,k]}(x[t]).

    No token is dropped. It runs on the backend that ``set_backend`` chose, by default the fastest one present for the
    device and dtype. ``reference.moe_mlp`` is the specification.

    Args:
        x_TD: tokens [T, D], fp16, bf16, fp32 or fp64.
        gate_up_E2FD: gate and up projections [E, 2F, D], gate rows first; x's dtype.
        down_EDF: down projections [E, D, F]; x's dtype.
        weights_TK: router weights [T, K], fp32.
        indices_TK: chosen experts [T, K], int32 or int64 in [-1, E); -1 marks a slot whose expert is on another rank.
        main_grads: ``main_grad_of`` gate_up and of down. The backward adds a weight's gradient to its buffer, calls
            ``ready`` and leaves ``.grad`` alone. A weight without one gets an ordinary gradient, and so do all in a
            compiled graph.
        on_input_gradients: called in the backward with the gradients of x and weights, so that their communication can
            overlap the product that gives gate_up's gradient. Both are complete in the current stream and must not be
            changed. The call comes before that product is queued; the cpu backend makes it after. There is no call in
            a compiled graph, or where the running backward makes no use of x's gradient. The caller must then start
            the communication when the gradients arrive.

    Returns:
        y [T, D] in x's dtype. An expert without tokens gets a zero gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, T*K is 2**31 or more, a main gradient's buffer does
            not fit, or, where the host can see it (cpu), an index is outside [-1, E). On a GPU such an index stops the
            device with an assertion (Triton, CUDA, and the reference on NVIDIA GPUs) or gives NaN (SYCL).
        BackendUnavailableError: the backend that was set cannot run here.
        RuntimeError: forward-mode AD, which the reference alone has.
    """
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    check_arguments(*arguments)
    for weight, main_grad in zip((gate_up_E2FD, down_EDF), main_grads, strict=True):
        if main_grad is not None:
            check_main_grad("moe_mlp", main_grad.buffer, weight)
    backend = resolve(x_TD.device, x_TD.dtype)
    run: Any = reference if backend == Backend.REFERENCE else kernels(backend)
    if backend == Backend.REFERENCE:
        check_values("moe_mlp", indices_TK, down_EDF.shape[0])
    if torch.compiler.is_compiling():
        main_grads, on_input_gradients = (None, None), None
    needs_python = (main_grads != (None, None) or on_input_gradients is not None) and torch.is_grad_enabled()
    if needs_python or backend != Backend.REFERENCE:
        refuse_tangents("moe_mlp", *arguments)
    if needs_python:
        y: Tensor = MoeMlpFunction.apply(*arguments, run, main_grads, on_input_gradients)
        return y
    return run.moe_mlp_forward(*arguments)[0]


def prefers_main_grads(x: Tensor) -> bool:
    """Whether ``moe_mlp`` on x is faster or more exact with main gradients, where no early input gradients are wanted.

    In fp32 the reference only loses: it rounds nothing anyway, and computes its forward again to add in the backward.
    """
    return x.dtype.itemsize < 4 or resolve(x.device, x.dtype) != Backend.REFERENCE


class MoeKernels(Protocol):
    """What a backend's module provides for ``moe_mlp``: a forward, and a backward whole or in two halves, or both.

    A whole backward, ``moe_mlp_backward(dy, arguments, saved, buffers, accumulate)``, returns the gradients of x,
    gate_up, down and weights; ``buffers`` and ``accumulate`` are pairs, for gate_up and down. With both present the
    whole one is the faster and runs where nobody asks for input gradients early.

    ``arguments`` are those of the forward, ``saved`` what it kept besides. The gradient of a weight with a buffer is
    added to the buffer, in at least fp32 and rounded at most once, and None is returned in its place. Without
    ``accumulate`` all of the buffer is overwritten, to the same bits as if it had been zero: zeros for an expert
    without tokens, whatever was there.
    """

    def moe_mlp_forward(
        self, x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns y and ``saved``. Autograd of y gives all gradients the ordinary way."""

    def moe_mlp_backward_inputs(
        self,
        dy_TD: Tensor,
        arguments: list[Tensor],
        saved: list[Tensor],
        down_buffer: Tensor | None,
        accumulate: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Any]:
        """Returns dx, ddown and dweights, complete in the current stream, and what the other half needs."""

    def moe_mlp_backward_up_weights(
        self,
        arguments: list[Tensor],
        saved: list[Tensor],
        pending: Any,
        gate_up_buffer: Tensor | None,
        accumulate: bool,
    ) -> Tensor | None:
        """Returns dgate_up, by one product: a quarter to a third of the backward."""


def register_moe_mlp(
    operation: str,
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    empty_order: Callable[[Tensor, int], Any] | None = None,
) -> None:
    """Registers autograd and shapes of a backend's operation, and of its gradient ``operation + "_backward"``.

    The operation returns y, hidden [T*K, 2F] before SwiGLU and, with ``empty_order``, its row order. Its gradient takes
    dy, the four differentiable arguments, then the indices (or nothing, if the order is kept), hidden and the order.

    Args:
        operation: name in torch.ops, "namespace::name".
        backward: called with dy and the saved tensors, an order's tensors one by one; returns the gradients of x,
            gate_up, down and weights.
        empty_order: from indices and E, a row order without values, as the operation returns it.
    """
    num_saved = 5 if empty_order is None else 4  # with the row order nobody needs the indices

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> None:
        kept = [t for part in output[1:] for t in (part if isinstance(part, (list, tuple)) else (part,))]
        ctx.save_for_backward(*inputs[:num_saved], *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # else autograd fills gradients of hidden and the order with zeros

    @reverse_mode_only("moe_mlp")
    def gradients(ctx: Any, dy: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        return (*backward(dy, *ctx.saved_tensors), None)

    @torch.library.register_fake(operation)
    def shapes(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> tuple[Any, ...]:
        order = () if empty_order is None else (empty_order(indices, down.shape[0]),)
        return x.new_empty(x.shape), x.new_empty(indices.numel(), gate_up.shape[1]), *order

    @torch.library.register_fake(f"{operation}_backward")
    def backward_shapes(
        dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *saved: Any
    ) -> tuple[Tensor, ...]:
        return tuple(t.new_empty(t.shape) for t in (x, gate_up, down, weights))

    torch.library.register_autograd(operation, gradients, setup_context=setup_context)
    refuse_gradient(f"{operation}_backward")


def register_backward_into(operation: str) -> None:
    """Registers shapes of a gradient that returns dx and dweights and writes those of gate_up and down to arguments."""

    @torch.library.register_fake(operation)
    def shapes(
        dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), weights.new_empty(weights.shape)


class MoeMlpFunction(torch.autograd.Function):
    """``moe_mlp`` whose backward adds to main gradients and calls ``on_input_gradients`` before its last product."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Returns y [T, D]. ``inputs``: the arguments of ``moe_mlp``, with the backend before the last two."""
        *arguments, ctx.backend, ctx.main_grads, ctx.on_input_gradients = inputs
        y, saved = ctx.backend.moe_mlp_forward(*arguments)
        ctx.save_for_backward(*arguments, *saved)
        return y

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("moe_mlp")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Returns a gradient for each input; None for a weight whose gradient was added to its main gradient."""
        tensors = ctx.saved_tensors  # read once: activation checkpointing gives them out a single time
        gate_up, down = (
            main_grad if main_grad is not None and is_used(ctx, position) else None
            for position, main_grad in zip((1, 2), ctx.main_grads, strict=True)
        )
        buffers = (None if gate_up is None else gate_up.buffer, None if down is None else down.buffer)
        accumulate = (gate_up is not None and gate_up.holds_sum(), down is not None and down.holds_sum())
        # A backward that is asked for the weights alone sends no input gradients: nobody would wait for them.
        on_input_gradients = ctx.on_input_gradients if is_used(ctx, 0) else None
        arguments, saved = list(tensors[:5]), list(tensors[5:])
        gradients = _gradients(ctx.backend, grads[0], arguments, saved, buffers, accumulate, on_input_gradients)
        for main_grad in (gate_up, down):
            if main_grad is not None:
                main_grad.ready()
        return *gradients, None, None, None, None


def _gradients(
    backend: Any,
    dy: Tensor,
    arguments: list[Tensor],
    saved: list[Tensor],
    buffers: tuple[Tensor | None, Tensor | None],
    accumulate: tuple[bool, bool],
    on_input_gradients: InputGradients | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of x, gate_up, down and weights, by the backend's whole backward or its halves."""
    if is_shape_only(dy):
        backend = reference  # for shapes: some kernels of these backwards are no operations of torch
    has_whole, has_halves = (hasattr(backend, f"moe_mlp_backward{half}") for half in ("", "_inputs"))
    if has_whole and (on_input_gradients is None or not has_halves):
        dx, dgate_up, ddown, dweights = backend.moe_mlp_backward(dy, arguments, saved, buffers, accumulate)
        if on_input_gradients is not None:
            on_input_gradients(dx, dweights)
        return dx, dgate_up, ddown, dweights
    dx, ddown, dweights, pending = backend.moe_mlp_backward_inputs(dy, arguments, saved, buffers[1], accumulate[1])
    if on_input_gradients is not None:
        on_input_gradients(dx, dweights)
    dgate_up = backend.moe_mlp_backward_up_weights(arguments, saved, pending, buffers[0], accumulate[0])
    return dx, dgate_up, ddown, dweights


def check_arguments(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> None:
    """Raises ValueError for arguments of ``moe_mlp`` whose shapes, dtypes or devices do not fit each other."""
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"moe_mlp: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}: "
            "expected [T, D], [E, 2F, D] and [E, D, F]"
        )
    experts, width, inner = down.shape
    if x.shape[1] != width or tuple(gate_up.shape) != (experts, 2 * inner, width):
        raise ValueError(
            f"moe_mlp: x {tuple(x.shape)} and gate_up {tuple(gate_up.shape)} do not fit "
            f"down [E, D, F] = {tuple(down.shape)}: expected [T, {width}] and [{experts}, {2 * inner}, {width}]"
        )
    if weights.shape != indices.shape or weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"moe_mlp: weights {tuple(weights.shape)} and indices {tuple(indices.shape)} must both be "
            f"[T, K] with T = {x.shape[0]}"
        )
    if weights.numel() >= 2**31:
        raise ValueError(f"moe_mlp: {weights.shape[0]} tokens of {weights.shape[1]} experts each; T*K is below 2**31")
    if 0 in (*down.shape, weights.shape[1]):
        raise ValueError(
            f"moe_mlp: down [E, D, F] = {tuple(down.shape)}, weights [T, K] = {tuple(weights.shape)}; only T may be 0"
        )
    if not x.dtype == gate_up.dtype == down.dtype or x.dtype not in _FLOATING:
        raise ValueError(
            f"moe_mlp: x {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype} must share a floating dtype of 16 bits "
            "or more"
        )
    if others := {t.device for t in (gate_up, down, weights, indices)} - {x.device}:
        raise ValueError(f"moe_mlp: x is on {x.device} but other arguments are on {sorted(map(str, others))}")
    if weights.dtype != torch.float32 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_mlp: weights {weights.dtype} must be float32 and indices {indices.dtype} int32 or int64")
