"""Public operations: checked at the door, then run by the chosen backend (backend.py); reference.py specifies them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import main_grads as _main_grads
from megatron.optimus.ops import reference
from megatron.optimus.ops.backend import (
    Backend,
    BackendUnavailableError,
    get_backend,
    kernels,
    resolve,
    set_backend,
)
from megatron.optimus.ops.copies import copy_rows, sum_copies
from megatron.optimus.ops.elementwise import (
    cross_entropy_gradient_,
    keeps_16_bits,
    log_sum_exp,
    rotate,
    silu_mul,
)
from megatron.optimus.ops.forward_mode import refuse_tangents
from megatron.optimus.ops.grouped import (
    FLOATING,
    check_main_grad,
    combine,
    gather_rows,
    grouped_input_gradient,
    grouped_linear,
    grouped_linear_swiglu,
    grouped_weight_gradient,
    swiglu,
)
from megatron.optimus.ops.main_grads import InputGradients, MainGrad, main_grad_of
from megatron.optimus.ops.reference import Routing, RowOrder
from megatron.optimus.ops.routing import check_values, expert_counts, route, router_topk, sort_slots

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "InputGradients",
    "MainGrad",
    "Routing",
    "RowOrder",
    "combine",
    "copy_rows",
    "cross_entropy_gradient_",
    "expert_counts",
    "gains_by_main_grads",
    "gather_rows",
    "get_backend",
    "grouped_input_gradient",
    "grouped_linear",
    "grouped_linear_swiglu",
    "grouped_weight_gradient",
    "keeps_16_bits",
    "log_sum_exp",
    "main_grad_of",
    "moe_mlp",
    "rotate",
    "route",
    "router_topk",
    "set_backend",
    "silu_mul",
    "sort_slots",
    "sum_copies",
    "swiglu",
]


def gains_by_main_grads(x: Tensor) -> bool:
    """Whether ``moe_mlp`` on x gains by main gradients, where nobody asks for input gradients early. In fp32 the
    reference only loses: it rounds nothing anyway, and computes its forward again to add in the backward."""
    return x.dtype.itemsize < 4 or resolve(x.device, x.dtype) != Backend.REFERENCE


def moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    main_grads: tuple[MainGrad | None, MainGrad | None] = (None, None),
    on_input_gradients: InputGradients | None = None,
) -> Tensor:
    """All SwiGLU experts of a layer on all their tokens; see ``reference.moe_mlp`` for the meaning of each argument.

    With ``main_grads``, ``main_grad_of`` each of the two weights, the backward adds a weight's gradient to its buffer,
    calls ``ready`` and leaves the weight's ``.grad`` alone; a weight without one gets its gradient as usual. A compiled
    graph gives all gradients as usual.

    ``on_input_gradients`` is called in the backward with the gradients of x and weights, complete in the current
    stream, before the product that gives the gradient of gate_up is queued (by a backend without such halves, cpu:
    after it). They are not to be changed. It is not called where the running backward makes no use of x's gradient, nor
    in a compiled graph: what it starts has then to be started where the gradients arrive.

    Runs on the backend that ``set_backend`` chose, by default the fastest one present for the device and dtype.
    Raises ValueError before anything runs for shapes, dtypes or devices that do not fit together, those of main
    gradients' buffers included, and for T*K of 2**31 or more, for expert indices as ``sort_slots`` does,
    BackendUnavailableError when a backend was set that cannot run here, and RuntimeError in forward-mode AD, which the
    reference alone has.
    """
    arguments = (x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    _check_moe_mlp(*arguments)
    for weight, main_grad in zip((gate_up_E2FD, down_EDF), main_grads, strict=True):
        if main_grad is not None:
            check_main_grad("moe_mlp", main_grad.buffer, tuple(weight.shape), weight.dtype, weight.device)
    backend = resolve(x_TD.device, x_TD.dtype)
    run: Any = reference if backend == Backend.REFERENCE else kernels(backend)
    if backend == Backend.REFERENCE:
        check_values("moe_mlp", indices_TK, down_EDF.shape[0])
    if torch.compiler.is_compiling():
        main_grads, on_input_gradients = (None, None), None
    wanted = (main_grads != (None, None) or on_input_gradients is not None) and torch.is_grad_enabled()
    if wanted or backend != Backend.REFERENCE:
        refuse_tangents("moe_mlp", *arguments)
    if wanted:
        return _main_grads.moe_mlp(run, arguments, main_grads, on_input_gradients)
    return run.moe_mlp(*arguments)


def _check_moe_mlp(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> None:
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
    if not x.dtype == gate_up.dtype == down.dtype or x.dtype not in FLOATING:
        raise ValueError(
            f"moe_mlp: x {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype} must share a floating dtype of 16 bits "
            "or more"
        )
    if others := {t.device for t in (gate_up, down, weights, indices)} - {x.device}:
        raise ValueError(f"moe_mlp: x is on {x.device} but other arguments are on {sorted(map(str, others))}")
    if weights.dtype != torch.float32 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_mlp: weights {weights.dtype} must be float32 and indices {indices.dtype} int32 or int64")
