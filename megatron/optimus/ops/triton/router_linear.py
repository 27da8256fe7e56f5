# mypy: disable-error-code=no-untyped-def
"""The router's product and its gradients: bf16 factors, the logits' gradient in fp32, exact products, sums in fp32.

The tensor cores take no fp32 factor. A fp32 number is the sum of three in bf16, and products of two bf16 numbers are
exact in fp32, so three products give the one wanted. The gradient of x splits the numbers as it reads them, once for
all columns; that of the weight is cuBLAS's, of numbers split before.

Legend: T tokens, D model width, E experts, C = E rounded up to a multiple of 32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.tiles import hardware


class _Launch(NamedTuple):
    tokens: int  # at a time
    columns: int
    warps: int
    stages: int
    programs: int  # per multiprocessor, about


# With fewer stages nothing is copied ahead: a copy then starts after the products that read its place.
_INPUT = _Launch(64, 128, 4, 3, 2)
_SMALL_SHARED = 101376  # bytes, of GPUs of which a program takes half as many experts at once


@triton.jit
def _in_three(dlogits_ptr, token, num_tokens, first, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr):
    """[tokens, EXPERTS] as three in bf16, whose sum it is; zeros beyond the last token and expert."""
    expert = first + tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :]
    value = tl.load(dlogits_ptr + token[:, None] * NUM_EXPERTS + expert[None, :], mask=inside, other=0.0)
    high = value.to(tl.bfloat16)
    value -= high.to(tl.float32)
    middle = value.to(tl.bfloat16)
    return high, middle, (value - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split(
    dlogits_ptr, out_ptr, num_tokens, padded, NUM_EXPERTS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    """out [T, 3, padded]: the parts side by side, for a product that someone else forms."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    first = tl.program_id(1) * EXPERTS
    high, middle, low = _in_three(dlogits_ptr, token, num_tokens, first, NUM_EXPERTS, EXPERTS)
    expert = first + tl.arange(0, EXPERTS)
    place = out_ptr + token[:, None] * 3 * padded + expert[None, :]
    inside = (token < num_tokens)[:, None] & (expert < padded)[None, :]
    tl.store(place, high, mask=inside)
    tl.store(place + padded, middle, mask=inside)
    tl.store(place + 2 * padded, low, mask=inside)


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
    dlogits_ptr, weight_ptr, dx_ptr, out_ptr, num_tokens, width, columns_each, NUM_EXPERTS: tl.constexpr,
    HAS_DX: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, MORE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = dx + dlogits @ weight: some tokens, columns_each columns. EXPERTS + MORE of them at once; if these are all,
    the tokens' numbers are read and split once."""
    at_once: tl.constexpr = EXPERTS + MORE
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    begin = tl.program_id(0) * columns_each
    if at_once >= NUM_EXPERTS:
        high, middle, low = _in_three(dlogits_ptr, token, num_tokens, 0, NUM_EXPERTS, EXPERTS)
        if MORE > 0:
            high2, middle2, low2 = _in_three(dlogits_ptr, token, num_tokens, EXPERTS, NUM_EXPERTS, MORE)
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
                high, middle, low = _in_three(dlogits_ptr, token, num_tokens, first, NUM_EXPERTS, EXPERTS)
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


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x_TD @ weight_ED.T`` of bf16 factors, in fp32."""
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


def input_gradient(dlogits_TE: Tensor, weight_ED: Tensor, dx_TD: Tensor | None) -> Tensor:
    """``dx_TD + dlogits_TE @ weight_ED`` of fp32 dlogits, all contiguous: rounded once, in bf16."""
    num_experts, width = weight_ED.shape
    num_tokens = dlogits_TE.shape[0]
    out = weight_ED.new_empty(num_tokens, width)
    tokens, columns, warps, stages, _ = _INPUT
    experts, more = _experts_at_once(num_experts, hardware(out.device).shared_bytes)
    groups = triton.cdiv(_num_programs(_INPUT, out), triton.cdiv(num_tokens, tokens))
    columns_each = triton.cdiv(triton.cdiv(width, columns), groups) * columns
    _input_gradient[(triton.cdiv(width, columns_each), triton.cdiv(num_tokens, tokens))](
        dlogits_TE, weight_ED, weight_ED if dx_TD is None else dx_TD, out, num_tokens, width, columns_each,
        NUM_EXPERTS=num_experts, HAS_DX=dx_TD is not None, TOKENS=tokens, COLUMNS=columns, EXPERTS=experts, MORE=more,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def weight_gradient(dlogits_TE: Tensor, x_TD: Tensor) -> Tensor:
    """``dlogits_TE.T @ x_TD`` of fp32 dlogits, both contiguous: summed in fp32, in bf16."""
    num_tokens, num_experts = dlogits_TE.shape
    padded = triton.cdiv(num_experts, 32) * 32
    parts_T3C = torch.empty(num_tokens, 3, padded, dtype=torch.bfloat16, device=dlogits_TE.device)
    tokens, experts = 32, 64
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(padded, experts))
    _split[grid](dlogits_TE, parts_T3C, num_tokens, padded, NUM_EXPERTS=num_experts, TOKENS=tokens, EXPERTS=experts)
    products = torch.mm(parts_T3C.flatten(1).t(), x_TD, out_dtype=torch.float32)
    return sum_parts(products, num_experts, x_TD.dtype)


def sum_parts(products_3CxD: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """The sum [E, D] of the three parts' fp32 products [3 C, D], rounded once."""
    rows, width = products_3CxD.shape
    out = products_3CxD.new_empty(num_experts, width, dtype=dtype)
    columns = 512
    _sum_parts[(triton.cdiv(width, columns), num_experts)](products_3CxD, out, rows // 3, width, COLUMNS=columns)
    return out


def _num_programs(launch: _Launch, like: Tensor) -> int:
    return launch.programs * hardware(like.device).processors


def _experts_at_once(num_experts: int, shared_bytes: int) -> tuple[int, int]:
    """Two powers of two that a program takes at once, the second may be 0: together all experts, or 64 of them."""
    most = 128 if shared_bytes > _SMALL_SHARED else 64
    wanted = triton.cdiv(num_experts, 16) * 16
    if wanted > most:
        return 64, 0
    experts = min(1 << (wanted.bit_length() - 1), 64)
    return experts, triton.next_power_of_2(wanted - experts) if wanted > experts else 0
