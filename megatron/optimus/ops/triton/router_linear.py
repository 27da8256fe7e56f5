# mypy: disable-error-code=no-untyped-def
"""Gradients of the router's product: bf16 factors, the logits' gradient in fp32, exact products, sums in fp32.

The tensor cores take no fp32 factor. A fp32 number is the sum of three in bf16, and products of two bf16 numbers are
exact in fp32, so three products side by side give the one wanted.

Legend: T tokens, D model width, E experts, C = E rounded up to a multiple of 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _in_three(value_ptr, out_ptr, num_tokens, num_experts, padded, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    valid = (token < num_tokens) & (expert < num_experts)
    value = tl.load(value_ptr + token * num_experts + expert, mask=valid, other=0.0)
    high = value.to(tl.bfloat16)
    value -= high.to(tl.float32)
    middle = value.to(tl.bfloat16)
    low = (value - middle.to(tl.float32)).to(tl.bfloat16)
    place = out_ptr + token * 3 * padded + expert
    inside = (token < num_tokens) & (expert < padded)
    tl.store(place, high, mask=inside)
    tl.store(place + padded, middle, mask=inside)
    tl.store(place + 2 * padded, low, mask=inside)


@triton.jit
def _input_gradient(
    parts_ptr, weight_ptr, dx_ptr, out_ptr, num_tokens, num_experts, padded, width, HAS_DX: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    place = token * width + column
    inside = (token < num_tokens) & (column < width)
    depth = tl.arange(0, PIECE)
    total = tl.zeros([TOKENS, COLUMNS], dtype=tl.float32)
    for start in range(3 * padded - PIECE, -PIECE, -PIECE):  # the smallest numbers first
        parts = tl.load(parts_ptr + token * 3 * padded + start + depth[None, :], mask=token < num_tokens, other=0.0)
        expert = (start % padded + depth)[:, None]
        weight = tl.load(
            weight_ptr + expert * width + column, mask=(expert < num_experts) & (column < width), other=0.0
        )
        total = tl.dot(parts, weight, total)
    if HAS_DX:
        total += tl.load(dx_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def in_three(dlogits_TE: Tensor) -> Tensor:
    """fp32 [T, E] to bf16 [T, 3, C], whose sum over the middle dimension it is; zeros beyond E."""
    num_tokens, num_experts = dlogits_TE.shape
    padded = triton.cdiv(num_experts, 32) * 32
    out = torch.empty(num_tokens, 3, padded, dtype=torch.bfloat16, device=dlogits_TE.device)
    tokens, experts = 32, 64
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(padded, experts))
    _in_three[grid](dlogits_TE, out, num_tokens, num_experts, padded, TOKENS=tokens, EXPERTS=experts)
    return out


def input_gradient(parts_T3C: Tensor, weight_ED: Tensor, dx_TD: Tensor | None) -> Tensor:
    """``dx_TD + dlogits_TE @ weight_ED`` for the dlogits that ``in_three`` was given, rounded once, in bf16."""
    num_experts, width = weight_ED.shape
    num_tokens, _, padded = parts_T3C.shape
    out = weight_ED.new_empty(num_tokens, width)
    tokens, columns = 64, 128
    grid = (triton.cdiv(width, columns), triton.cdiv(num_tokens, tokens))
    _input_gradient[grid](
        parts_T3C, weight_ED, weight_ED if dx_TD is None else dx_TD, out, num_tokens, num_experts, padded, width,
        HAS_DX=dx_TD is not None, TOKENS=tokens, COLUMNS=columns, PIECE=32 if padded % 64 else 64,
        num_warps=4,
    )  # fmt: skip
    return out


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x_TD @ weight_ED.T`` of bf16 factors, in fp32."""
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


def weight_gradient(parts_T3C: Tensor, x_TD: Tensor, num_experts: int) -> Tensor:
    """``dlogits_TE.T @ x_TD`` in fp32, for the dlogits that ``in_three`` was given."""
    _, _, padded = parts_T3C.shape
    products = torch.mm(parts_T3C.flatten(1).t(), x_TD, out_dtype=torch.float32)
    return products.view(3, padded, -1)[:, :num_experts].sum(0)
