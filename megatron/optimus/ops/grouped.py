"""Single operations on rows in expert order, for models that compose their own experts. ``moe_mlp`` is the same fused.

    order = ops.sort_slots(indices_TK, num_experts, x_TD.dtype)
    hidden = ops.grouped_linear_swiglu(ops.gather_rows(x_TD, order), gate_up_E2FD, order)
    y_TD = ops.combine(ops.grouped_linear(hidden, down_EDF, order), order, weights_TK)

Every operation has gradients, runs on the backend of its rows' device and dtype (see backend.py), needs nothing of the
host but on the reference backend, and is bitwise the same from run to run. ``reference.py`` says what each computes.
Arguments may have any strides; buffers that are written to must be contiguous. Shapes, dtypes and devices that do not
fit raise ValueError before anything runs; forward-mode AD raises RuntimeError on all backends but the reference. An
order is trusted to come from ``sort_slots``; on the CPU it is checked.

Rows of no local slot (on Triton also the padding between experts) are zero after ``gather_rows`` and after the gradient
of ``combine``. A model that writes rows by itself must keep them finite there, and zero where rows are gradients.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.backend import Backend, kernels, resolve
from megatron.optimus.ops.forward_mode import refuse_tangents, reverse_mode_only
from megatron.optimus.ops.reference import RowOrder
from megatron.optimus.ops.second_derivatives import refuse

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gather_rows(x_TD: Tensor, order: RowOrder) -> Tensor:
    """Each row's token: [T, D] -> [P, D]; see ``reference.gather_rows``."""
    if x_TD.dim() != 2 or x_TD.shape[0] != order.rows_TK.shape[0]:
        raise ValueError(f"gather_rows: x {tuple(x_TD.shape)}; expected [{order.rows_TK.shape[0]}, D] as the order's")
    if _on_reference("gather_rows", order, None, x_TD):
        return reference.gather_rows(x_TD, order)
    return _gather_rows(x_TD, order.tensors())


def combine(rows_PD: Tensor, order: RowOrder, weights_TK: Tensor) -> Tensor:
    """Each token's weighted sum of rows: [P, D] and fp32 [T, K] -> [T, D]; see ``reference.combine``."""
    if weights_TK.shape != order.rows_TK.shape:
        expected = tuple(order.rows_TK.shape)
        raise ValueError(f"combine: weights {tuple(weights_TK.shape)}; expected [T, K] = {expected} as the order's")
    if weights_TK.dtype != torch.promote_types(rows_PD.dtype, torch.float32):
        raise ValueError(f"combine: weights {weights_TK.dtype}; expected float32 (float64 with float64 rows)")
    if _on_reference("combine", order, rows_PD, weights_TK):
        return reference.combine(rows_PD, order, weights_TK)
    return _combine(rows_PD, weights_TK, order.tensors(), weights_TK.shape[0])


def swiglu(hidden_P2F: Tensor, order: RowOrder) -> Tensor:
    """silu(gate) * up of each row: [P, 2F] -> [P, F]; see ``reference.swiglu``."""
    if hidden_P2F.dim() != 2 or hidden_P2F.shape[1] % 2:
        raise ValueError(f"swiglu: hidden {tuple(hidden_P2F.shape)}; expected [P, 2F]")
    if _on_reference("swiglu", order, hidden_P2F):
        return reference.swiglu(hidden_P2F)
    return _swiglu(hidden_P2F, order.tensors())


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, order: RowOrder, main_grad: Tensor | None = None) -> Tensor:
    """Each row times its expert's weight: [P, I] -> [P, O]; see ``reference.grouped_linear`` for ``main_grad``."""
    _check_weight("grouped_linear", x_PI, weight_EOI, order, main_grad)
    if _on_reference("grouped_linear", order, x_PI, weight_EOI, main_grad):
        return reference.grouped_linear(x_PI, weight_EOI, order, main_grad)
    return _grouped_linear(x_PI, weight_EOI, main_grad, order.tensors())


def grouped_linear_swiglu(
    x_PD: Tensor, gate_up_E2FD: Tensor, order: RowOrder, main_grad: Tensor | None = None
) -> Tensor:
    """The up projection with SwiGLU in its epilogue: [P, D] -> [P, F]; see ``reference.grouped_linear_swiglu``."""
    _check_weight("grouped_linear_swiglu", x_PD, gate_up_E2FD, order, main_grad)
    if gate_up_E2FD.shape[1] % 2:
        raise ValueError(f"grouped_linear_swiglu: gate_up {tuple(gate_up_E2FD.shape)}; expected [E, 2F, D]")
    if _on_reference("grouped_linear_swiglu", order, x_PD, gate_up_E2FD, main_grad):
        return reference.grouped_linear_swiglu(x_PD, gate_up_E2FD, order, main_grad)
    return _grouped_linear_swiglu(x_PD, gate_up_E2FD, main_grad, order.tensors())[0]


def grouped_input_gradient(dout_PO: Tensor, weight_EOI: Tensor, order: RowOrder) -> Tensor:
    """[P, O] -> [P, I]; see ``reference.grouped_input_gradient``. No gradient of its own."""
    _check_weight("grouped_input_gradient", dout_PO, weight_EOI.transpose(-1, -2), order, None)
    if _on_reference("grouped_input_gradient", order, dout_PO, weight_EOI):
        return reference.grouped_input_gradient(dout_PO, weight_EOI, order)
    return _grouped_input_gradient(dout_PO, weight_EOI, order.tensors())


def grouped_weight_gradient(
    dout_PO: Tensor, x_PI: Tensor, order: RowOrder, main_grad: Tensor | None = None, accumulate: bool = True
) -> Tensor:
    """[P, O] and [P, I] -> [E, O, I], or added to ``main_grad``, or written over it if not ``accumulate``; see
    ``reference``. No gradient of its own."""
    if dout_PO.dim() != 2 or x_PI.dim() != 2 or dout_PO.dtype != x_PI.dtype:
        raise ValueError(
            f"grouped_weight_gradient: dout {dout_PO.dtype} {tuple(dout_PO.shape)} and x {x_PI.dtype} "
            f"{tuple(x_PI.shape)}; expected [P, O] and [P, I] of one dtype"
        )
    check_main_grad("grouped_weight_gradient", main_grad, _weight_shape(dout_PO, x_PI, order), x_PI.dtype)
    on_reference = _on_reference("grouped_weight_gradient", order, dout_PO, main_grad)
    if x_PI.shape[0] != dout_PO.shape[0] or x_PI.device != dout_PO.device:
        raise ValueError(
            f"grouped_weight_gradient: x {tuple(x_PI.shape)} on {x_PI.device} beside dout on {dout_PO.device}"
        )
    if on_reference:
        return reference.grouped_weight_gradient(dout_PO, x_PI, order, main_grad, accumulate)
    refuse_tangents("grouped_weight_gradient", x_PI)
    if main_grad is None:
        return _grouped_weight_gradient(dout_PO, x_PI, order.tensors())
    _put_weight_gradient(main_grad, dout_PO, x_PI, order.tensors(), accumulate)
    return main_grad


def _kernels(rows: Tensor) -> ModuleType:
    return kernels(resolve(rows.device, rows.dtype))


def _weight_shape(dout: Tensor, x: Tensor, order: RowOrder) -> tuple[int, int, int]:
    return order.counts_E.shape[0], dout.shape[1], x.shape[1]


# What is checked at the door


def _on_reference(name: str, order: RowOrder, rows: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the reference runs this; raises ValueError where order, rows and the rest do not belong together.

    ``rows`` is None for an operation whose first argument is in token order: that is then the first of ``others``.
    """
    leading = rows if rows is not None else next(t for t in others if t is not None)
    if leading.dtype not in FLOATING:
        raise ValueError(f"{name}: rows are {leading.dtype}; expected a floating dtype of 16 bits or more")
    if leading.shape[-1] == 0:
        raise ValueError(f"{name}: rows {tuple(leading.shape)}; expected a width of 1 or more")
    tensors = [*order.tensors(), *(t for t in (rows, *others) if t is not None)]
    if elsewhere := {str(t.device) for t in tensors} - {str(leading.device)}:
        raise ValueError(f"{name}: the rows are on {leading.device} but other arguments are on {sorted(elsewhere)}")
    if any(t.dtype != torch.int32 or t.dim() != 1 + (t is order.rows_TK) for t in order.tensors()):
        raise ValueError(
            f"{name}: an order's tensors are int32, rows [T, K], the others 1-D; use what sort_slots returned"
        )
    if rows is not None and (rows.dim() != 2 or rows.shape[0] != order.slots_P.shape[0]):
        raise ValueError(f"{name}: rows {tuple(rows.shape)}; expected [{order.slots_P.shape[0]}, width] as the order's")
    backend = resolve(leading.device, leading.dtype)
    num_slots, num_experts = order.rows_TK.numel(), order.counts_E.shape[0]
    sizes = [num_slots, num_slots, num_experts, num_experts + 3]
    if backend != Backend.REFERENCE:
        sizes = kernels(backend).order_sizes(num_slots, num_experts)
    if sizes != [t.numel() for t in order.tensors()]:
        raise ValueError(
            f"{name}: the order was made for another backend than {backend.value!r}; "
            f"use sort_slots(indices, num_experts, {leading.dtype}) under the backend that runs this"
        )
    if backend != Backend.REFERENCE:
        refuse_tangents(name, rows, *others)
    return backend == Backend.REFERENCE


def _check_weight(name: str, rows: Tensor, weight: Tensor, order: RowOrder, main_grad: Tensor | None) -> None:
    num_experts = order.counts_E.shape[0]
    fits = rows.dim() == 2 and weight.dim() == 3 and weight.shape[0] == num_experts
    if not fits or weight.shape[2] != rows.shape[1] or weight.dtype != rows.dtype or 0 in weight.shape:
        raise ValueError(
            f"{name}: rows {rows.dtype} {tuple(rows.shape)} and weight {weight.dtype} {tuple(weight.shape)} of "
            f"{num_experts} experts do not fit: expected one dtype and a common width, none of them 0"
        )
    check_main_grad(name, main_grad, tuple(weight.shape), weight.dtype)


def check_main_grad(
    name: str, main_grad: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Raises ValueError for a buffer that cannot take the gradient of a weight of this shape, dtype and device."""
    if main_grad is None:
        return
    if device is not None and main_grad.device != device:
        raise ValueError(f"{name}: main_grad is on {main_grad.device} but its weight on {device}")
    wide = torch.promote_types(dtype, torch.float32)
    if tuple(main_grad.shape) != shape or main_grad.dtype not in (wide, dtype) or not main_grad.is_contiguous():
        raise ValueError(
            f"{name}: main_grad {main_grad.dtype} {tuple(main_grad.shape)} with strides {main_grad.stride()}; expected "
            f"contiguous {shape} of {wide} or {dtype}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{name}: main_grad requires a gradient itself; give the buffer detached")


# The operations below the door: one per kernel, with its shape and its gradient


@torch.library.custom_op("optimus::gather_rows", mutates_args=())
def _gather_rows(x: Tensor, order: list[Tensor]) -> Tensor:
    return _kernels(x).gather_rows(x.contiguous(), RowOrder.of(order))


@_gather_rows.register_fake
def _(x: Tensor, order: list[Tensor]) -> Tensor:
    return x.new_empty(order[0].shape[0], x.shape[1])


@torch.library.custom_op("optimus::combine", mutates_args=())
def _combine(rows: Tensor, weights: Tensor | None, order: list[Tensor], num_tokens: int) -> Tensor:
    weights = None if weights is None else weights.contiguous()
    return _kernels(rows).combine(rows.contiguous(), RowOrder.of(order), weights, num_tokens)


@_combine.register_fake
def _(rows: Tensor, weights: Tensor | None, order: list[Tensor], num_tokens: int) -> Tensor:
    return rows.new_empty(num_tokens, rows.shape[1])


@torch.library.custom_op("optimus::combine_backward", mutates_args=())
def _combine_backward(dy: Tensor, rows: Tensor, weights: Tensor, order: list[Tensor]) -> tuple[Tensor, Tensor]:
    arguments = (dy.contiguous(), rows.contiguous(), RowOrder.of(order), weights.contiguous())
    return _kernels(rows).combine_backward(*arguments)


@_combine_backward.register_fake
def _(dy: Tensor, rows: Tensor, weights: Tensor, order: list[Tensor]) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


@torch.library.custom_op("optimus::swiglu", mutates_args=())
def _swiglu(hidden: Tensor, order: list[Tensor]) -> Tensor:
    return _kernels(hidden).swiglu(hidden.contiguous(), RowOrder.of(order))


@_swiglu.register_fake
def _(hidden: Tensor, order: list[Tensor]) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


@torch.library.custom_op("optimus::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, hidden: Tensor, order: list[Tensor]) -> Tensor:
    return _kernels(hidden).swiglu_gradient(hidden.contiguous(), grad.contiguous(), RowOrder.of(order))


@_swiglu_backward.register_fake
def _(grad: Tensor, hidden: Tensor, order: list[Tensor]) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("optimus::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, main_grad: Tensor | None, order: list[Tensor]) -> Tensor:
    return _kernels(x).grouped_linear(x.contiguous(), weight.contiguous(), RowOrder.of(order))


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, main_grad: Tensor | None, order: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("optimus::grouped_linear_swiglu", mutates_args=())
def _grouped_linear_swiglu(
    x: Tensor, weight: Tensor, main_grad: Tensor | None, order: list[Tensor]
) -> tuple[Tensor, Tensor]:
    return _kernels(x).grouped_linear_swiglu(x.contiguous(), weight.contiguous(), RowOrder.of(order))


@_grouped_linear_swiglu.register_fake
def _(x: Tensor, weight: Tensor, main_grad: Tensor | None, order: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[1] // 2), x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("optimus::grouped_input_gradient", mutates_args=())
def _grouped_input_gradient(dout: Tensor, weight: Tensor, order: list[Tensor]) -> Tensor:
    return _kernels(dout).grouped_input_gradient(dout.contiguous(), weight.contiguous(), RowOrder.of(order))


@_grouped_input_gradient.register_fake
def _(dout: Tensor, weight: Tensor, order: list[Tensor]) -> Tensor:
    return dout.new_empty(dout.shape[0], weight.shape[2])


@torch.library.custom_op("optimus::grouped_weight_gradient", mutates_args=())
def _grouped_weight_gradient(dout: Tensor, x: Tensor, order: list[Tensor]) -> Tensor:
    return _kernels(x).grouped_weight_gradient(dout.contiguous(), x.contiguous(), RowOrder.of(order), None, False)


@_grouped_weight_gradient.register_fake
def _(dout: Tensor, x: Tensor, order: list[Tensor]) -> Tensor:
    return x.new_empty(order[2].shape[0], dout.shape[1], x.shape[1])


@torch.library.custom_op("optimus::put_grouped_weight_gradient_", mutates_args=("main_grad",))
def _put_weight_gradient(main_grad: Tensor, dout: Tensor, x: Tensor, order: list[Tensor], accumulate: bool) -> None:
    arguments = (dout.contiguous(), x.contiguous(), RowOrder.of(order), main_grad, accumulate)
    _kernels(x).grouped_weight_gradient(*arguments)


@_put_weight_gradient.register_fake
def _(main_grad: Tensor, dout: Tensor, x: Tensor, order: list[Tensor], accumulate: bool) -> None:
    return None


def _keep_order(ctx: Any, order: list[Tensor], *saved: Tensor | None) -> None:
    ctx.save_for_backward(*saved, *order)
    ctx.num_saved = len(saved)


def _kept(ctx: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    return (*tensors[: ctx.num_saved], list(tensors[ctx.num_saved :]))


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order = inputs
    ctx.num_tokens = x.shape[0]
    _keep_order(ctx, order)


@reverse_mode_only("gather_rows")
def _gather_gradient(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    (order,) = _kept(ctx)
    return _combine(drows, None, order, ctx.num_tokens), [None] * len(order)


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, order, _ = inputs
    _keep_order(ctx, order, rows, weights)


@reverse_mode_only("combine")
def _combine_gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    rows, weights, order = _kept(ctx)
    if weights is None:  # as the gradient of gather_rows, which a second derivative goes through
        return _gather_rows(dy, order), None, [None] * len(order), None
    return *_combine_backward(dy, rows, weights, order), [None] * len(order), None


def _setup_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, order = inputs
    _keep_order(ctx, order, hidden)


@reverse_mode_only("swiglu")
def _swiglu_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    hidden, order = _kept(ctx)
    return _swiglu_backward(grad, hidden, order), [None] * len(order)


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, main_grad, order = inputs
    ctx.main_grad = main_grad  # not saved for backward: other micro-batches change it in between
    hidden = None
    if isinstance(output, tuple):
        hidden = output[1]
        ctx.mark_non_differentiable(hidden)
        ctx.set_materialize_grads(False)  # else autograd fills a gradient of hidden with zeros
    _keep_order(ctx, order, x, weight, hidden)


@reverse_mode_only("grouped_linear")
def _linear_gradient(ctx: Any, dout: Tensor | None, _dhidden: None = None) -> tuple[Any, ...]:
    x, weight, hidden, order = _kept(ctx)
    nothing = [None] * len(order)
    if dout is None:
        return None, None, None, nothing
    if hidden is not None:
        dout = _swiglu_backward(dout, hidden, order)
    dx = _grouped_input_gradient(dout, weight, order) if ctx.needs_input_grad[0] else None
    dweight = None
    if ctx.needs_input_grad[1] and ctx.main_grad is None:
        dweight = _grouped_weight_gradient(dout, x, order)
    elif ctx.needs_input_grad[1]:
        _put_weight_gradient(ctx.main_grad, dout, x, order, True)
    return dx, dweight, None, nothing


_gather_rows.register_autograd(_gather_gradient, setup_context=_setup_gather)
_combine.register_autograd(_combine_gradient, setup_context=_setup_combine)
_swiglu.register_autograd(_swiglu_gradient, setup_context=_setup_swiglu)
_grouped_linear.register_autograd(_linear_gradient, setup_context=_setup_linear)
_grouped_linear_swiglu.register_autograd(_linear_gradient, setup_context=_setup_linear)
for _name in ("combine_backward", "swiglu_backward", "grouped_input_gradient", "grouped_weight_gradient"):
    refuse(f"optimus::{_name}")
