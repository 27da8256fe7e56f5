"""Backend ``cpu``: the C++ kernels of csrc/cpu. Import after the compiled library is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.optimus.ops.fused_moe import register_backward_into, register_moe_mlp

_C = torch.ops.optimus


def instruction_sets() -> list[str]:
    """The instruction sets that this processor has and the products have kernels for, fastest first.

    Of amx (fp32 as a sum of bf16 parts, see docs/design/expert_kernels.md), avx512, avx2 and plain.
    """
    return _C.cpu_instruction_sets().split(",")


def use_instructions(name: str | None) -> None:
    """Makes all later products of the process use an instruction set, to test or to compare it; None: the fastest.

    Raises ValueError for one that this processor does not have.
    """
    _C.cpu_use_instructions(name or "")


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """See ``reference.expert_counts``."""
    return _C.cpu_expert_counts(indices_TK, num_experts)


def sum_copies(y_SD: Tensor, positions_TP: Tensor) -> Tensor:
    """See ``reference.sum_copies``."""
    return _C.cpu_sum_copies(y_SD, positions_TP)


def router_topk(
    logits_TE: Tensor, topk: int, sigmoid: bool, normalize: bool, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses K experts per token as ``reference.router_topk``. Returns weights, experts and scores."""
    return _C.cpu_router_topk(logits_TE, topk, sigmoid, normalize, bias_E)


def router_topk_backward(
    scores_TE: Tensor, indices_TK: Tensor, dweights_TK: Tensor, dscores: Tensor | None, sigmoid: bool, normalize: bool
) -> Tensor:
    """Gradient of the logits, fp32 [T, E].

    Args:
        scores_TE: as ``router_topk`` returned them, and so are ``indices_TK``.
        dweights_TK: gradient of the weights.
        dscores: gradient of the scores, [T, E]; None: none came.
    """
    dscores_TE = torch.zeros_like(scores_TE) if dscores is None else dscores
    return _C.cpu_router_topk_backward(scores_TE, indices_TK, dweights_TK, dscores_TE, sigmoid, normalize)


def moe_mlp_forward(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, indices_TK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """See ``fused_moe.MoeKernels``. Saves the hidden rows [T*K, 2F] before SwiGLU."""
    y, hidden = _C.moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, indices_TK)
    return y, [hidden]


def moe_mlp_backward(
    dy_TD: Tensor,
    arguments: list[Tensor],
    saved: list[Tensor],
    buffers: tuple[Tensor | None, Tensor | None],
    accumulate: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """See ``fused_moe.MoeKernels``."""
    weights = arguments[1:3]
    outputs = [w.new_empty(w.shape) if b is None else b for w, b in zip(weights, buffers, strict=True)]
    adds = [b is not None and a for b, a in zip(buffers, accumulate, strict=True)]
    dx, dweights = _C.moe_mlp_backward_into(dy_TD, *arguments, *saved, *outputs, *adds)
    dgate_up, ddown = (out if b is None else None for out, b in zip(outputs, buffers, strict=True))
    return dx, dgate_up, ddown, dweights


register_moe_mlp("optimus::moe_mlp", _C.moe_mlp_backward)
register_backward_into("optimus::moe_mlp_backward_into")


@torch.library.register_fake("optimus::cpu_sum_copies")
def _sum_copies_shape(copies: Tensor, positions: Tensor) -> Tensor:
    return copies.new_empty(positions.shape[0], copies.shape[1])
