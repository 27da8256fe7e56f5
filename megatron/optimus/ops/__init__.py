"""Public operations: checked at the door, then run by the chosen backend."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.backend import (
    Backend,
    BackendUnavailableError,
    get_backend,
    resolve,
    runs_triton,
    set_backend,
)
from megatron.optimus.ops.reference import Routing, expert_counts

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "Routing",
    "expert_counts",
    "get_backend",
    "moe_mlp",
    "router_topk",
    "set_backend",
]


def router_topk(
    logits_TE: Tensor,
    topk: int,
    *,
    sigmoid: bool = False,
    normalize: bool = False,
    selection_bias_E: Tensor | None = None,
) -> Routing:
    """Chooses K experts per token; see ``reference.router_topk``. Raises ValueError if K is not in [1, E]."""
    if logits_TE.dim() != 2 or not 1 <= topk <= logits_TE.shape[1]:
        raise ValueError(
            f"router_topk: topk={topk} of logits {tuple(logits_TE.shape)}; expected [T, E] and 1 <= K <= E"
        )
    if logits_TE.dtype == torch.float32 and runs_triton(logits_TE.device) and logits_TE.shape[1] <= 1024:
        from megatron.optimus.ops.triton import router

        return Routing(*router.router_topk(logits_TE, topk, sigmoid, normalize, selection_bias_E))
    return reference.router_topk(
        logits_TE, topk, sigmoid=sigmoid, normalize=normalize, selection_bias_E=selection_bias_E
    )


def moe_mlp(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """All SwiGLU experts of a layer on all their tokens; see ``reference.moe_mlp`` for the meaning of each argument.

    Runs on the backend that ``set_backend`` chose, by default the fastest one present for the device and dtype.
    Raises ValueError for shapes, dtypes or devices that do not fit together, before anything runs, and
    BackendUnavailableError when a backend was set that cannot run here.
    """
    _check_moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    backend = resolve(x_TD.device, x_TD.dtype)
    if backend is Backend.CPU:
        from megatron.optimus.ops import cpu

        return cpu.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    if backend is Backend.TRITON:
        from megatron.optimus.ops.triton import moe_mlp as triton_moe_mlp

        return triton_moe_mlp.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    if backend is Backend.SYCL:
        from megatron.optimus.ops import sycl

        return sycl.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    return reference.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)


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
    if not x.dtype == gate_up.dtype == down.dtype or not x.is_floating_point():
        raise ValueError(
            f"moe_mlp: x {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype} must share a floating dtype"
        )
    if others := {t.device for t in (gate_up, down, weights, indices)} - {x.device}:
        raise ValueError(f"moe_mlp: x is on {x.device} but other arguments are on {sorted(map(str, others))}")
    if weights.dtype != torch.float32 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe_mlp: weights {weights.dtype} must be float32 and indices {indices.dtype} int32 or int64")
