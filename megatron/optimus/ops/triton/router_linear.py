# mypy: disable-error-code=no-untyped-def
"""A linear router of bf16 factors: logits and choice in one kernel, exact products, sums and logits in fp32.

Backward: the tensor cores take no fp32 factor, but a fp32 number is the sum of three in bf16, and products of two bf16
numbers are exact in fp32, so three products give the one wanted. One kernel makes these parts of the logits' gradient,
for both products; that of the weight is cuBLAS's.

Legend: T tokens, D model width, E experts, K chosen, C = E rounded up to a multiple of 32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.router import choose, logits_gradient, router_topk
from megatron.optimus.ops.triton.tiles import hardware


class _LaunchConfig(NamedTuple):
    tokens: int  # of a program
    step: int  # depth or columns at a time
    warps: int
    stages: int


# benchmarks/results/cuda_kernels_h200.txt, section 22
_CHOICE_OF_FEW = _LaunchConfig(64, 128, 4, 5)  # where all programs run at once, one to a multiprocessor
_CHOICE = _LaunchConfig(128, 64, 8, 5)
_MOST_CHOOSE = 128  # experts whose logits a program holds beside what is on its way
# With fewer stages nothing is copied ahead: a copy then starts after the products that read its place.
_INPUT = _LaunchConfig(64, 128, 4, 3)
_INPUT_OF_MANY = _LaunchConfig(64, 64, 4, 3)  # experts: more than 64
_INPUT_PROGRAMS = 2  # per multiprocessor
_SMALL_SHARED = 101376  # bytes, of GPUs of which a program takes half as many experts at once


@triton.jit
def _route(
    x_ptr, weight_ptr, bias_ptr, logits_ptr, weights_ptr, indices_ptr, scores_ptr, num_tokens, width,
    NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there, is_expert = (token < num_tokens)[:, None], expert < NUM_EXPERTS
    logits = tl.zeros([TOKENS, EXPERTS], dtype=tl.float32)
    for start in tl.range(0, width, DEPTH, num_stages=STAGES):
        column = start + tl.arange(0, DEPTH)[None, :]
        x = tl.load(x_ptr + token[:, None] * width + column, mask=there & (column < width), other=0.0)
        inside = is_expert[:, None] & (column < width)
        weight = tl.load(weight_ptr + expert[:, None] * width + column, mask=inside, other=0.0)
        logits = tl.dot(x, tl.trans(weight), logits)
    place = token[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(logits_ptr + place, logits, mask=there & is_expert[None, :])
    choose(
        logits, bias_ptr, weights_ptr, indices_ptr, scores_ptr, token, num_tokens, NUM_EXPERTS, TOPK, SIGMOID,
        NORMALIZE, BIASED, TOKENS, EXPERTS, SLOTS,
    )  # fmt: skip


@triton.jit
def _gradient_parts(
    scores_ptr, indices_ptr, dweights_ptr, dscores_ptr, dlogits_ptr, parts_ptr, num_tokens, num_experts, padded,
    TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, HAS_DSCORES: tl.constexpr,
    HAS_DLOGITS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """parts [T, 3, padded]: the logits' gradient as three in bf16, whose sum it is; zeros beyond the last expert."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)[None, :]
    value = logits_gradient(
        scores_ptr, indices_ptr, dweights_ptr, dscores_ptr, token, num_tokens, num_experts, TOPK, SIGMOID, NORMALIZE,
        HAS_DSCORES, TOKENS, EXPERTS,
    )  # fmt: skip
    there = (token < num_tokens)[:, None]
    if HAS_DLOGITS:
        inside = there & (expert < num_experts)
        value += tl.load(dlogits_ptr + token[:, None] * num_experts + expert, mask=inside, other=0.0)
    value = tl.where(expert < num_experts, value, 0.0)
    high = value.to(tl.bfloat16)
    value -= high.to(tl.float32)
    middle = value.to(tl.bfloat16)
    low = (value - middle.to(tl.float32)).to(tl.bfloat16)
    place = parts_ptr + token[:, None] * 3 * padded + expert
    inside = there & (expert < padded)
    tl.store(place, high, mask=inside)
    tl.store(place + padded, middle, mask=inside)
    tl.store(place + 2 * padded, low, mask=inside)


@triton.jit
def _load_parts(parts_ptr, token, num_tokens, first, padded, EXPERTS: tl.constexpr):
    expert = first + tl.arange(0, EXPERTS)
    place = parts_ptr + token[:, None] * 3 * padded + expert[None, :]
    inside = (token < num_tokens)[:, None] & (expert < padded)[None, :]
    high = tl.load(place, mask=inside, other=0.0)
    middle = tl.load(place + padded, mask=inside, other=0.0)
    return high, middle, tl.load(place + 2 * padded, mask=inside, other=0.0)


@triton.jit
def _load_weight(weight_ptr, first, column, width, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr):
    expert = first + tl.arange(0, EXPERTS)
    inside = (expert < NUM_EXPERTS)[:, None] & (column < width)[None, :]
    return tl.load(weight_ptr + expert[:, None] * width + column[None, :], mask=inside, other=0.0)


@triton.jit
def _add_rows(total, high, middle, low, weight):
    """Adds the tokens' numbers times the experts' weights; the smallest first."""
    total = tl.dot(low, weight, total)
    total = tl.dot(middle, weight, total)
    return tl.dot(high, weight, total)


@triton.jit
def _input_gradient(
    parts_ptr, weight_ptr, dx_ptr, out_ptr, num_tokens, width, columns_each, padded, NUM_EXPERTS: tl.constexpr,
    HAS_DX: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, MORE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = dx + dlogits @ weight: some tokens, columns_each columns. EXPERTS + MORE of them at once; if these are all,
    the tokens' numbers are read once."""
    at_once: tl.constexpr = EXPERTS + MORE
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    begin = tl.program_id(0) * columns_each
    if at_once >= NUM_EXPERTS:
        high, middle, low = _load_parts(parts_ptr, token, num_tokens, 0, padded, EXPERTS)
        if MORE > 0:
            high2, middle2, low2 = _load_parts(parts_ptr, token, num_tokens, EXPERTS, padded, MORE)
    for start in tl.range(begin, min(begin + columns_each, width), COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        place = token[:, None] * width + column[None, :]
        inside = (token < num_tokens)[:, None] & (column < width)[None, :]
        if HAS_DX:  # in the sum from the start: so it is copied ahead, as the factors of a product are
            total = tl.load(dx_ptr + place, mask=inside, other=0.0).to(tl.float32)
        else:
            total = tl.zeros([TOKENS, COLUMNS], dtype=tl.float32)
        if at_once >= NUM_EXPERTS:
            weight = _load_weight(weight_ptr, 0, column, width, NUM_EXPERTS, EXPERTS)
            total = _add_rows(total, high, middle, low, weight)
            if MORE > 0:
                weight2 = _load_weight(weight_ptr, EXPERTS, column, width, NUM_EXPERTS, MORE)
                total = _add_rows(total, high2, middle2, low2, weight2)
        else:
            for first in range(0, NUM_EXPERTS, EXPERTS):
                high, middle, low = _load_parts(parts_ptr, token, num_tokens, first, padded, EXPERTS)
                weight = _load_weight(weight_ptr, first, column, width, NUM_EXPERTS, EXPERTS)
                total = _add_rows(total, high, middle, low, weight)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_parts(products_ptr, out_ptr, padded, width, COLUMNS: tl.constexpr):
    """out [E, D] = the sum of products [3, padded, D] over the parts, the smallest first."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.program_id(1).to(tl.int64)
    inside = column < width
    part = products_ptr + expert * width + column
    apart = padded.to(tl.int64) * width
    total = tl.load(part + 2 * apart, mask=inside, other=0.0) + tl.load(part + apart, mask=inside, other=0.0)
    total += tl.load(part, mask=inside, other=0.0)
    tl.store(out_ptr + expert * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def route(
    x_TD: Tensor, weight_ED: Tensor, topk: int, sigmoid: bool, normalize: bool, bias_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 factors, contiguous, to fp32 weights [T, K], int64 indices [T, K], fp32 scores and logits [T, E]."""
    num_tokens, width = x_TD.shape
    num_experts = weight_ED.shape[0]
    if num_experts > _MOST_CHOOSE:
        logits = torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
        return (*router_topk(logits, topk, sigmoid, normalize, bias_E), logits)
    logits = x_TD.new_empty(num_tokens, num_experts, dtype=torch.float32)
    scores = torch.empty_like(logits)
    weights = logits.new_empty(num_tokens, topk)
    indices = logits.new_empty(num_tokens, topk, dtype=torch.int64)
    found = hardware(x_TD.device)
    is_few = triton.cdiv(num_tokens, _CHOICE_OF_FEW.tokens) <= found.processors
    tokens, depth, warps, stages = _CHOICE_OF_FEW if is_few else _CHOICE
    experts = max(triton.next_power_of_2(num_experts), 16)
    stages = max(1, min(stages, found.shared_bytes // ((tokens + experts) * depth * x_TD.element_size())))
    _route[(triton.cdiv(num_tokens, tokens),)](
        x_TD, weight_ED, logits if bias_E is None else bias_E, logits, weights, indices, scores, num_tokens, width,
        NUM_EXPERTS=num_experts, TOPK=topk, SIGMOID=sigmoid, NORMALIZE=normalize, BIASED=bias_E is not None,
        TOKENS=tokens, EXPERTS=experts, SLOTS=triton.next_power_of_2(topk), DEPTH=depth, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return weights, indices, scores, logits


def gradient_parts(
    scores_TE: Tensor,
    indices_TK: Tensor,
    dweights_TK: Tensor,
    dscores_TE: Tensor | None,
    dlogits_TE: Tensor | None,
    sigmoid: bool,
    normalize: bool,
) -> Tensor:
    """The gradient of the logits, of all that was made of them and their own, as three in bf16 [T, 3, C]."""
    num_tokens, num_experts = scores_TE.shape
    padded = triton.cdiv(num_experts, 32) * 32
    parts = scores_TE.new_empty(num_tokens, 3, padded, dtype=torch.bfloat16)
    experts = triton.next_power_of_2(padded)
    tokens = max(512 // experts, 1)
    _gradient_parts[(triton.cdiv(num_tokens, tokens),)](
        scores_TE, indices_TK, dweights_TK, scores_TE if dscores_TE is None else dscores_TE,
        scores_TE if dlogits_TE is None else dlogits_TE, parts, num_tokens, num_experts, padded,
        TOPK=indices_TK.shape[1], SIGMOID=sigmoid, NORMALIZE=normalize, HAS_DSCORES=dscores_TE is not None,
        HAS_DLOGITS=dlogits_TE is not None, TOKENS=tokens, EXPERTS=experts, num_warps=4,
    )  # fmt: skip
    return parts


def input_gradient(parts_T3C: Tensor, weight_ED: Tensor, dx_TD: Tensor | None) -> Tensor:
    """``dx_TD + dlogits_TE @ weight_ED``, all contiguous: rounded once, in bf16."""
    num_experts, width = weight_ED.shape
    num_tokens, _, padded = parts_T3C.shape
    out = weight_ED.new_empty(num_tokens, width)
    tokens, columns, warps, stages = _INPUT if num_experts <= 64 else _INPUT_OF_MANY
    found = hardware(out.device)
    experts, more = _experts_at_once(num_experts, found.shared_bytes)
    blocks = triton.cdiv(num_tokens, tokens)
    groups = max(1, _INPUT_PROGRAMS * found.processors // blocks)  # of columns: no more programs than run at once
    columns_each = triton.cdiv(triton.cdiv(width, columns), groups) * columns
    _input_gradient[(triton.cdiv(width, columns_each), blocks)](
        parts_T3C, weight_ED, weight_ED if dx_TD is None else dx_TD, out, num_tokens, width, columns_each, padded,
        NUM_EXPERTS=num_experts, HAS_DX=dx_TD is not None, TOKENS=tokens, COLUMNS=columns, EXPERTS=experts, MORE=more,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def weight_gradient(parts_T3C: Tensor, x_TD: Tensor, num_experts: int) -> Tensor:
    """``dlogits_TE.T @ x_TD``, both contiguous: summed in fp32, in bf16."""
    products = torch.mm(parts_T3C.flatten(1).t(), x_TD, out_dtype=torch.float32)
    return sum_parts(products, num_experts, x_TD.dtype)


def sum_parts(products_3CxD: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """The sum [E, D] of the three parts' fp32 products [3 C, D], rounded once."""
    rows, width = products_3CxD.shape
    out = products_3CxD.new_empty(num_experts, width, dtype=dtype)
    columns = 512
    _sum_parts[(triton.cdiv(width, columns), num_experts)](products_3CxD, out, rows // 3, width, COLUMNS=columns)
    return out


def _experts_at_once(num_experts: int, shared_bytes: int) -> tuple[int, int]:
    """Two powers of two that a program takes at once, the second may be 0: together all experts, or 64 of them."""
    most = 128 if shared_bytes > _SMALL_SHARED else 64
    wanted = triton.cdiv(num_experts, 16) * 16
    if wanted > most:
        return 64, 0
    experts = min(1 << (wanted.bit_length() - 1), 64)
    return experts, triton.next_power_of_2(wanted - experts) if wanted > experts else 0
