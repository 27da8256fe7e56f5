"""The router: logits, choice of experts, their gradients, and the slots of each expert. Nothing waits for the host.

Legend: T tokens, D model width, K experts per token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import (
    can_be_read,
    carries_tangent,
    refuse_gradient,
    refuse_tangents,
    reverse_mode_only,
)
from megatron.optimus.ops.backend import Backend, kernels, resolve_routing
from megatron.optimus.ops.reference import Routing


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    topk: int,
    *,
    sigmoid: bool = False,
    normalize: bool = False,
    selection_bias_E: Tensor | None = None,
) -> tuple[Routing, Tensor, Tensor]:
    """Linear router: chooses K experts for each token and gives their weights.

    Logits are products and sums in fp32 (fp64 on the reference for fp64), under autocast too. Of equal scores the lower
    expert is taken. NaN counts as the largest score (plus bias, if any): a divergence is not hidden by other experts.
    In bf16 on NVIDIA GPUs the tensor cores multiply, in one kernel with the choice for up to 128 experts: exact
    products, sums in fp32 in another order; the logits' gradient keeps all 24 bits. x is saved as it is, without an
    fp32 copy. ``reference.route`` is the specification.

    Args:
        x_TD: tokens [T, D], floating.
        weight_ED: the router's weight [E, D], floating.
        topk: K, 1 to E.
        sigmoid: scores are a sigmoid of the logits rather than a softmax over E.
        normalize: divide the K weights of a token by their sum.
        selection_bias_E: [E], added to the scores for the choice only (aux-loss-free balancing, arXiv 2408.15664).

    Returns:
        The routing (weights [T, K], indices [T, K], scores [T, E]), the fp32 logits [T, E], and x for the experts. Give
        the experts this x: router and experts then share one gradient of x, rounded once, without an addition.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or K is outside [1, E].
        BackendUnavailableError: the backend that was set cannot run here.
        RuntimeError: forward-mode AD on a backend other than the reference.
    """
    fits = x_TD.dim() == 2 and weight_ED.dim() == 2 and x_TD.shape[1] == weight_ED.shape[1]
    if x_TD.device != weight_ED.device:
        raise ValueError(f"route: x is on {x_TD.device} but weight on {weight_ED.device}")
    if not fits or not x_TD.is_floating_point() or not weight_ED.is_floating_point():
        raise ValueError(
            f"route: x {x_TD.dtype} {tuple(x_TD.shape)} and weight {weight_ED.dtype} {tuple(weight_ED.shape)}; "
            "expected floating [T, D] and [E, D]"
        )
    bias, num_experts = selection_bias_E, weight_ED.shape[0]
    _check_choice("route", topk, num_experts, bias, x_TD.device)
    if _has_kernel(x_TD.device, num_experts):
        refuse_tangents("route", x_TD, weight_ED, bias)
        *routing, logits_TE, x_out_TD = _Route.apply(x_TD, weight_ED, topk, sigmoid, normalize, bias)
        return Routing(*routing), logits_TE, x_out_TD
    if carries_tangent(x_TD, weight_ED):
        logits_TE, x_out_TD = reference.router_logits(x_TD, weight_ED), x_TD
    else:
        logits_TE, x_out_TD = _Logits.apply(x_TD, weight_ED)
    choice = reference.router_topk(logits_TE, topk, sigmoid=sigmoid, normalize=normalize, selection_bias_E=bias)
    return choice, logits_TE, x_out_TD


def expert_counts(indices_TK: Tensor, num_experts: int) -> Tensor:
    """Counts the slots of each expert.

    Args:
        indices_TK: chosen experts [T, K], int32 or int64 in [-1, E); -1 counts for none.
        num_experts: E.

    Returns:
        int64 [E], on the device of the indices.

    Raises:
        ValueError: indices are not [T, K] of int32 or int64 or, on the CPU, one is outside [-1, E).
    """
    _check_indices("expert_counts", indices_TK, num_experts)
    if resolve_routing(indices_TK.device) == Backend.REFERENCE:
        check_values("expert_counts", indices_TK, num_experts)
        return reference.expert_counts(indices_TK, num_experts)
    return _expert_counts(indices_TK, num_experts)


def _check_choice(name: str, topk: int, num_experts: int, bias: Tensor | None, device: torch.device) -> None:
    if not 1 <= topk <= num_experts:
        raise ValueError(f"{name}: topk={topk} of {num_experts} experts; expected 1 <= K <= E")
    if bias is not None and (bias.shape != (num_experts,) or bias.device != device):
        raise ValueError(
            f"{name}: selection bias {tuple(bias.shape)} on {bias.device}; expected [{num_experts}] on {device}"
        )


def _has_kernel(device: torch.device, num_experts: int) -> bool:
    """Whether a fast backend chooses among so many experts."""
    backend = resolve_routing(device)
    too_wide = backend == Backend.TRITON and num_experts > kernels(backend).MAX_EXPERTS
    return backend != Backend.REFERENCE and not too_wide


def _check_indices(name: str, indices: Tensor, num_experts: int) -> None:
    if indices.dim() != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: indices {indices.dtype} {tuple(indices.shape)}; expected int32 or int64 [T, K]")
    if num_experts < 1:
        raise ValueError(f"{name}: num_experts={num_experts}; expected at least 1")
    if indices.shape[1] < 1 or indices.numel() >= 2**31:
        raise ValueError(f"{name}: indices {tuple(indices.shape)}; expected K >= 1 and T*K < 2**31")


def check_values(name: str, indices: Tensor, num_experts: int) -> None:
    """Raises ValueError for an index outside [-1, E). For the reference, which would take E for a foreign expert."""
    if not can_be_read(indices):
        return
    wrong = (indices < -1) | (indices >= num_experts)
    if indices.is_cuda:  # without waiting
        torch._assert_async(~wrong.any(), "an expert index is outside [-1, E)")
    elif indices.device.type == "cpu" and wrong.any():
        raise ValueError(f"{name}: indices hold {int(indices[wrong][0])}; expected values in [-1, {num_experts})")


class _Logits(torch.autograd.Function):
    """Logits of the reference: plain PyTorch, but it saves no fp32 copy of x, and rounds x's gradient once."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.set_materialize_grads(False)
        return reference.router_logits(x_TD, weight_ED), x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        dlogits_TE, dx_TD = grads
        x_TD, weight_ED = ctx.saved_tensors
        if dlogits_TE is None:
            return dx_TD, None
        return _linear_gradients(dlogits_TE, x_TD, weight_ED, dx_TD)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, topk: int, *options: Any) -> tuple[Tensor, ...]:
        weights, indices, scores, logits = _route(x_TD, weight_ED, topk, *options)
        ctx.sigmoid, ctx.normalize, _ = options
        ctx.save_for_backward(x_TD, weight_ED, scores, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)  # zeros for what no loss used would be [T, E]
        return weights, indices, scores, logits, x_TD.view_as(x_TD)

    @staticmethod
    @reverse_mode_only("route")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dweights, _, dscores, dlogits, dx = grads
        nothing = (None,) * 4
        if dweights is None and dscores is None and dlogits is None:
            return dx, None, *nothing
        x, weight, scores, indices = ctx.saved_tensors
        dweights = scores.new_zeros(indices.shape) if dweights is None else dweights
        of_choice = (scores, indices, dweights, dscores, dlogits, ctx.sigmoid, ctx.normalize)
        return *_route_backward(x, weight, dx, *of_choice), *nothing


def _linear_gradients(dlogits: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of x, to which dx is added, and of weight: in the logits' dtype, fp32 or fp64, rounded once."""
    wide = dlogits.dtype
    with reference.without_autocast(x.device):
        sum_TD, dweight_ED = dlogits @ weight.to(wide), dlogits.t() @ x.to(wide)
    if dx is not None:
        sum_TD = sum_TD.to(torch.promote_types(x.dtype, wide)) + dx
    return sum_TD.to(x.dtype), dweight_ED.to(weight.dtype)


def _on_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    is_wide = x.dtype == weight.dtype == torch.bfloat16 and x.is_cuda and x.shape[0] > 0
    is_wide = is_wide and torch.version.hip is None  # whether ROCm multiplies 16 bits to fp32 was not tried
    return is_wide and resolve_routing(x.device) == Backend.TRITON


@torch.library.custom_op("optimus::route", mutates_args=())
def _route(
    x: Tensor, weight: Tensor, topk: int, sigmoid: bool, normalize: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (topk, sigmoid, normalize, None if bias is None else bias.float().contiguous())
    if _on_tensor_cores(x, weight):
        return _linear().route(x.contiguous(), weight.contiguous(), *options)
    logits = reference.router_logits(x.float(), weight.float())
    return (*kernels(resolve_routing(x.device)).router_topk(logits, *options), logits)


@_route.register_fake
def _(
    x: Tensor, weight: Tensor, topk: int, sigmoid: bool, normalize: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    indices = x.new_empty(x.shape[0], topk, dtype=torch.int64)
    return logits.new_empty(indices.shape), indices, torch.empty_like(logits), logits


@torch.library.custom_op("optimus::route_backward", mutates_args=())
def _route_backward(
    x: Tensor, weight: Tensor, dx: Tensor | None, scores: Tensor, indices: Tensor, dweights: Tensor,
    dscores: Tensor | None, dlogits: Tensor | None, sigmoid: bool, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x, to which dx is added, and of weight."""
    x, weight, dx = x.contiguous(), weight.contiguous(), None if dx is None else dx.contiguous()
    tensors = (scores, indices, dweights, dscores, dlogits)
    *of_choice, dlogits = (None if t is None else t.contiguous() for t in tensors)
    if _on_tensor_cores(x, weight):
        parts = _linear().gradient_parts(*of_choice, dlogits, sigmoid, normalize)
        dweight = _linear().weight_gradient(parts, x, weight.shape[0])
        return _linear().input_gradient(parts, weight, dx), dweight
    grad = kernels(resolve_routing(x.device)).router_topk_backward(*of_choice, sigmoid, normalize)
    return _linear_gradients(grad if dlogits is None else grad + dlogits, x, weight, dx)


@_route_backward.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _linear() -> Any:
    from megatron.optimus.ops.triton import router_linear

    return router_linear


@torch.library.custom_op("optimus::expert_counts", mutates_args=())
def _expert_counts(indices: Tensor, num_experts: int) -> Tensor:
    return kernels(resolve_routing(indices.device)).expert_counts(indices.contiguous(), num_experts)


@_expert_counts.register_fake
def _(indices: Tensor, num_experts: int) -> Tensor:
    return indices.new_empty(num_experts, dtype=torch.int64)


refuse_gradient("optimus::route_backward")
