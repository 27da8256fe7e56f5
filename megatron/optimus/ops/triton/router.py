# mypy: disable-error-code=no-untyped-def
"""``reference.router_topk`` in one kernel each way: scores, choice and renormalisation of a token stay in registers.

Legend: T tokens, E experts, K chosen. Of equal scores the expert with the lower number is taken; NaN is the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops import reference

MAX_EXPERTS = 1024  # a program holds whole rows of scores
_SCORES, _WARPS = 512, 2  # of a program
_LEAST = tl.constexpr(-(2**31))  # the key of no number
_LEAST_SUM = tl.constexpr(reference.LEAST_SUM)


@triton.jit
def _as_ordered(bits):
    """Bits of fp32 to integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(score):
    """In the order of scores, every NaN the largest, whatever its sign and bits; above _LEAST, so that whatever the
    scores, K different experts are chosen."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, _as_ordered(bits))


@triton.jit
def choose(
    logits, bias_ptr, weights_ptr, indices_ptr, scores_ptr, token, num_tokens, num_experts, TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes scores, choice and weights of some tokens, from logits [TOKENS, EXPERTS]: anything beyond num_experts."""
    expert = tl.arange(0, EXPERTS)[None, :]
    there = (token < num_tokens)[:, None]
    is_expert = expert < num_experts
    logits = tl.where(is_expert, logits, -float("inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    tl.store(scores_ptr + token[:, None] * num_experts + expert, scores, mask=there & is_expert)
    choice = scores
    if BIASED:
        choice += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _key(choice), _LEAST)
    total = tl.zeros([TOKENS], dtype=tl.float32)
    slot = tl.arange(0, SLOTS)[None, :]
    weights = tl.zeros([TOKENS, SLOTS], dtype=tl.float32)
    indices = tl.zeros([TOKENS, SLOTS], dtype=tl.int32)
    for k in tl.static_range(TOPK):
        key = tl.max(keys, 1)  # and then its place: two maxima of one number each are faster than one of pairs
        best = tl.min(tl.where(keys == key[:, None], expert, EXPERTS), 1)
        chosen = expert == best[:, None]
        if BIASED:
            weight = tl.sum(tl.where(chosen, scores, 0.0), 1)
        else:
            weight = _as_ordered(key).to(tl.float32, bitcast=True)
        keys = tl.where(chosen, _LEAST, keys)
        total += weight
        weights = tl.where(slot == k, weight[:, None], weights)
        indices = tl.where(slot == k, best[:, None], indices)
    if NORMALIZE:
        weights /= tl.where(total < _LEAST_SUM, _LEAST_SUM, total)[:, None]
    place = token[:, None] * TOPK + slot
    inside = there & (slot < TOPK)
    tl.store(weights_ptr + place, weights, mask=inside)
    tl.store(indices_ptr + place, indices.to(tl.int64), mask=inside)


@triton.jit
def _router_topk(
    logits_ptr, bias_ptr, weights_ptr, indices_ptr, scores_ptr, num_tokens, num_experts, TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < num_tokens)[:, None] & (expert < num_experts)
    logits = tl.load(logits_ptr + token[:, None] * num_experts + expert, mask=inside, other=-float("inf"))
    choose(
        logits, bias_ptr, weights_ptr, indices_ptr, scores_ptr, token, num_tokens, num_experts, TOPK, SIGMOID,
        NORMALIZE, BIASED, TOKENS, EXPERTS, SLOTS,
    )  # fmt: skip


@triton.jit
def logits_gradient(
    scores_ptr, indices_ptr, dweights_ptr, dscores_ptr, token, num_tokens, num_experts, TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_DSCORES: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """[TOKENS, EXPERTS] of some tokens; anything beyond the last token and expert."""
    there = token < num_tokens
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = there[:, None] & (expert < num_experts)
    place = token[:, None] * num_experts + expert
    scores = tl.load(scores_ptr + place, mask=inside, other=0.0)
    grad = tl.zeros([TOKENS, EXPERTS], dtype=tl.float32)
    chosen = tl.zeros([TOKENS, EXPERTS], dtype=tl.int1)
    for k in tl.static_range(TOPK):
        index = tl.load(indices_ptr + token * TOPK + k, mask=there, other=-1).to(tl.int32)
        here = expert == index[:, None]
        dweight = tl.load(dweights_ptr + token * TOPK + k, mask=there, other=0.0)
        grad = tl.where(here, dweight[:, None], grad)
        chosen = chosen | here
    if NORMALIZE:  # weight = score / total, total over the chosen or a constant, if that is more
        total = tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None]
        is_less = total < _LEAST_SUM
        total = tl.where(is_less, _LEAST_SUM, total)
        mean = tl.where(is_less, 0.0, tl.sum(tl.where(chosen, grad * scores, 0.0), 1)[:, None] / total)
        grad = tl.where(chosen, (grad - mean) / total, 0.0)
    if HAS_DSCORES:
        grad += tl.load(dscores_ptr + place, mask=inside, other=0.0)
    if SIGMOID:
        grad = grad * scores * (1.0 - scores)
    else:
        grad = scores * (grad - tl.sum(scores * grad, 1)[:, None])
    return grad


@triton.jit
def _router_topk_backward(
    scores_ptr, indices_ptr, dweights_ptr, dscores_ptr, dlogits_ptr, num_tokens, num_experts, TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_DSCORES: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)[None, :]
    grad = logits_gradient(
        scores_ptr, indices_ptr, dweights_ptr, dscores_ptr, token, num_tokens, num_experts, TOPK, SIGMOID, NORMALIZE,
        HAS_DSCORES, TOKENS, EXPERTS,
    )  # fmt: skip
    inside = (token < num_tokens)[:, None] & (expert < num_experts)
    tl.store(dlogits_ptr + token[:, None] * num_experts + expert, grad, mask=inside)


def _launch_shape(num_experts: int) -> tuple[int, int, int]:
    """Experts rounded up to a power of two, the tokens of a program (about _SCORES scores, for many programs), and its
    warps: with 4 where a row is more than a warp reads at a time, the order of sums depends on them."""
    experts = max(triton.next_power_of_2(num_experts), 2)
    return experts, max(_SCORES // experts, 1), _WARPS if experts <= 128 else 4


def router_topk(
    logits_TE: Tensor, topk: int, sigmoid: bool, normalize: bool, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits to fp32 weights [T, K], int64 indices [T, K] and fp32 scores [T, E]."""
    num_tokens, num_experts = logits_TE.shape
    weights = logits_TE.new_empty(num_tokens, topk)
    indices = logits_TE.new_empty(num_tokens, topk, dtype=torch.int64)
    scores = torch.empty_like(logits_TE)
    experts, tokens, warps = _launch_shape(num_experts)
    _router_topk[(triton.cdiv(num_tokens, tokens),)](
        logits_TE, logits_TE if bias_E is None else bias_E, weights, indices, scores, num_tokens, num_experts,
        TOPK=topk, SIGMOID=sigmoid, NORMALIZE=normalize, BIASED=bias_E is not None, TOKENS=tokens, EXPERTS=experts,
        SLOTS=triton.next_power_of_2(topk), num_warps=warps,
    )  # fmt: skip
    return weights, indices, scores


def router_topk_backward(
    scores_TE: Tensor, indices_TK: Tensor, dweights_TK: Tensor, dscores: Tensor | None, sigmoid: bool, normalize: bool
) -> Tensor:
    """Gradient of the logits; ``dscores`` [T, E], if it is not zero."""
    num_tokens, num_experts = scores_TE.shape
    dlogits = torch.empty_like(scores_TE)
    experts, tokens, warps = _launch_shape(num_experts)
    _router_topk_backward[(triton.cdiv(num_tokens, tokens),)](
        scores_TE, indices_TK, dweights_TK, scores_TE if dscores is None else dscores, dlogits, num_tokens,
        num_experts, TOPK=indices_TK.shape[1], SIGMOID=sigmoid, NORMALIZE=normalize, HAS_DSCORES=dscores is not None,
        TOKENS=tokens, EXPERTS=experts, num_warps=warps,
    )  # fmt: skip
    return dlogits
