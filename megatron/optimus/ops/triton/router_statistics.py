# mypy: disable-error-code=no-untyped-def
"""What losses and metrics need of a router, in one pass over logits and scores each way.

Sums over tokens are those of a program, then of all programs, in a fixed order.

Legend: T tokens, E experts, K chosen, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton import tiles

MAX_EXPERTS = 1024
_TILE = 1024  # numbers of a program's tile
_PROGRAMS = 2  # for each multiprocessor
_SUMMED = 32  # programs whose sums the last kernel reads at a time


@triton.jit
def _load_rows(ptr, token, num_tokens, num_experts, other, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < num_tokens)[:, None] & (expert < num_experts)
    return tl.load(ptr + token[:, None] * num_experts + expert, mask=inside, other=other)


@triton.jit
def _partial_sums(
    logits_ptr, scores_ptr, indices_ptr, counts_ptr, shares_ptr, means_ptr, num_tokens, num_experts,
    TOPK: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Sums over a program's tokens: slots and shares of each expert, squared log-sum-exps, entropies."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([TOKENS, EXPERTS], tl.int32)
    shares = tl.zeros([TOKENS, EXPERTS], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    entropies = tl.zeros([TOKENS], tl.float32)
    for first in range(tl.program_id(0) * TOKENS, num_tokens, tl.num_programs(0) * TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        there = token < num_tokens
        logits = _load_rows(logits_ptr, token, num_tokens, num_experts, -float("inf"), EXPERTS)
        largest = tl.max(logits, 1)
        log_sum = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), 1))
        squares += tl.where(there, log_sum * log_sum, 0.0)
        scores = _load_rows(scores_ptr, token, num_tokens, num_experts, 0.0, EXPERTS)
        share = scores / tl.where(there, tl.sum(scores, 1), 1.0)[:, None]
        shares += share
        entropies += tl.sum(tl.where(share > 0.0, -share * tl.log(tl.where(share > 0.0, share, 1.0)), share * 0.0), 1)
        for k in tl.static_range(TOPK):
            index = tl.load(indices_ptr + token * TOPK + k, mask=there, other=-1).to(tl.int32)
            counts += (expert[None, :] == index[:, None]).to(tl.int32)
    program = tl.program_id(0)
    place = program * num_experts + expert
    tl.store(counts_ptr + place, tl.sum(counts, 0), mask=expert < num_experts)
    tl.store(shares_ptr + place, tl.sum(shares, 0), mask=expert < num_experts)
    tl.store(means_ptr + 2 * program, tl.sum(squares, 0))
    tl.store(means_ptr + 2 * program + 1, tl.sum(entropies, 0))


@triton.jit
def _sum_partials(
    counts_ptr, shares_ptr, means_ptr, counts_out_ptr, shares_out_ptr, means_out_ptr, num_programs, num_tokens,
    num_experts, SUMMED: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([SUMMED, EXPERTS], tl.int32)
    shares = tl.zeros([SUMMED, EXPERTS], tl.float32)
    means = tl.zeros([SUMMED, 2], tl.float32)
    which = tl.arange(0, 2)[None, :]
    for first in range(0, num_programs, SUMMED):
        program = (first + tl.arange(0, SUMMED))[:, None]
        place, inside = (
            program * num_experts + expert[None, :],
            (program < num_programs) & (expert < num_experts)[None, :],
        )
        counts += tl.load(counts_ptr + place, mask=inside, other=0)
        shares += tl.load(shares_ptr + place, mask=inside, other=0.0)
        means += tl.load(means_ptr + 2 * program + which, mask=(program < num_programs) & (which < 2), other=0.0)
    tl.store(counts_out_ptr + expert, tl.sum(counts, 0).to(tl.int64), mask=expert < num_experts)
    tl.store(shares_out_ptr + expert, tl.sum(shares, 0) / num_tokens, mask=expert < num_experts)
    tl.store(means_out_ptr + tl.arange(0, 2), tl.sum(means, 0) / num_tokens)


@triton.jit
def _gradients(
    logits_ptr, scores_ptr, dshare_ptr, dz_ptr, dscores_ptr, dlogits_ptr, num_tokens, num_experts,
    HAS_SHARE: tl.constexpr, HAS_Z: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    place = token[:, None] * num_experts + expert[None, :]
    if HAS_SHARE:
        scores = _load_rows(scores_ptr, token, num_tokens, num_experts, 0.0, EXPERTS)
        grad = tl.load(dshare_ptr + expert, mask=expert < num_experts, other=0.0) / num_tokens
        total = tl.where(token < num_tokens, tl.sum(scores, 1), 1.0)[:, None]
        along = tl.sum(scores * grad[None, :], 1)[:, None] / total
        tl.store(dscores_ptr + place, (grad[None, :] - along) / total, mask=inside)
    if HAS_Z:
        logits = _load_rows(logits_ptr, token, num_tokens, num_experts, -float("inf"), EXPERTS)
        largest = tl.max(logits, 1)[:, None]
        powers = tl.exp(logits - largest)
        total = tl.sum(powers, 1)[:, None]
        factor = 2.0 * tl.load(dz_ptr) / num_tokens * (largest + tl.log(total))
        tl.store(dlogits_ptr + place, factor * (powers / total), mask=inside)


def _launch_shape(num_experts: int) -> tuple[int, int]:
    """Experts rounded up to a power of two, and the tokens of a tile."""
    experts = max(triton.next_power_of_2(num_experts), 2)
    return experts, max(1, _TILE // experts)


def statistics(logits_TE: Tensor, scores_TE: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of each expert int64 [E], their mean shares fp32 [E], and mean squared log-sum-exp and entropy fp32 [2]."""
    num_tokens, num_experts = logits_TE.shape
    experts, tokens = _launch_shape(num_experts)
    programs = min(triton.cdiv(num_tokens, tokens), _PROGRAMS * tiles.hardware(logits_TE.device).processors)
    counts_PE = logits_TE.new_empty(programs, num_experts, dtype=torch.int32)
    shares_PE, means_P2 = logits_TE.new_empty(programs, num_experts), logits_TE.new_empty(programs, 2)
    _partial_sums[(programs,)](
        logits_TE, scores_TE, indices_TK, counts_PE, shares_PE, means_P2, num_tokens, num_experts,
        TOPK=indices_TK.shape[1], TOKENS=tokens, EXPERTS=experts, num_warps=4,
    )  # fmt: skip
    counts_E = counts_PE.new_empty(num_experts, dtype=torch.int64)
    share_E, means_2 = shares_PE.new_empty(num_experts), shares_PE.new_empty(2)
    _sum_partials[(1,)](
        counts_PE, shares_PE, means_P2, counts_E, share_E, means_2, programs, num_tokens, num_experts,
        SUMMED=_SUMMED, EXPERTS=experts, num_warps=4,
    )  # fmt: skip
    return counts_E, share_E, means_2


def gradients(
    logits_TE: Tensor, scores_TE: Tensor, dshare_E: Tensor | None, dz: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of logits (by the z-loss) and scores (by the mean shares), where there are incoming ones."""
    num_tokens, num_experts = logits_TE.shape
    experts, tokens = _launch_shape(num_experts)
    dlogits = None if dz is None else torch.empty_like(logits_TE)
    dscores = None if dshare_E is None else torch.empty_like(scores_TE)
    given = [logits_TE if t is None else t for t in (dshare_E, dz, dscores, dlogits)]
    _gradients[(triton.cdiv(num_tokens, tokens),)](
        logits_TE, scores_TE, *given, num_tokens, num_experts, HAS_SHARE=dshare_E is not None, HAS_Z=dz is not None,
        TOKENS=tokens, EXPERTS=experts, num_warps=4,
    )  # fmt: skip
    return dlogits, dscores
