# mypy: disable-error-code=no-untyped-def
"""RMSNorm of rows, also of the sum of two, and of queries and keys with the rotary embedding behind it.

Statistics and arithmetic in fp32, one rounding; the backward computes the statistics again from the rows, which it
reads anyway. The gradient of the weight is summed over the rows of each program, then over programs, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton import tiles

MAX_WIDTH = 2**15  # of a row, which one program keeps in registers
_TILE, _TILE_BACKWARD = 2048, 4096  # elements of a program's tile, where a row is shorter; of rms_norm's backward
_PROGRAMS = 8  # of a backward, for each multiprocessor


@triton.jit
def _rms_norm(
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, num_rows, width, eps,
    ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (col < width)[None, :]
    place = row[:, None] * width + col[None, :]
    weight = tl.load(weight_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, total, mask=inside)
        x = total.to(tl.float32)  # rounded: the backward has no other
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(out_ptr + place, (x * inverse[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    x_ptr, weight_ptr, grad_ptr, along_ptr, dx_ptr, dweight_ptr, num_rows, width, eps,
    ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every num_programs-th block of rows and writes its sum of the weight's gradient.

    ADDS: ``along`` is a gradient of the rows that comes along the residual.
    """
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (col < width)[None, :]
        place = row[:, None] * width + col[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
        normed = x * inverse[:, None]
        dweight += grad * normed
        grad = grad * weight[None, :]
        parallel = tl.sum(grad * normed, 1) / width
        dx = (grad - normed * parallel[:, None]) * inverse[:, None]
        if ADDS:
            dx += tl.load(along_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    place = tl.program_id(0).to(tl.int64) * width + col
    tl.store(dweight_ptr + place, tl.sum(dweight, 0), mask=col < width)


@triton.jit
def _inverse_rms(first, second, width, eps, PER_HEAD: tl.constexpr):
    """1 / rms of each head, or of each row of heads, of pairs [ROWS, HEADS, HALF]: [ROWS, HEADS or 1, 1]."""
    squares = tl.sum(first * first + second * second, 2)
    if not PER_HEAD:
        squares = tl.sum(squares, 1)[:, None]
    return (1.0 / tl.sqrt(squares / width + eps))[:, :, None]


@triton.jit
def _norm_rotate(
    x_ptr, weight_ptr, out_ptr, cos_ptr, sin_ptr, num_rows, length, heads, x_row, table_batch, table_row, width, eps,
    HALF: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of ``heads`` heads of 2 * HALF elements, ``x_row`` apart: normed, then each pair (i, i + HALF) rotated."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    head, col = tl.arange(0, HEADS)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inside = (row < num_rows) & (head < heads) & (col < HALF)
    place = (row * heads + head) * (2 * HALF) + col
    of_weight = (col if PER_HEAD else head * (2 * HALF) + col) + row * 0
    angle = (row // length) * table_batch + (row % length) * table_row + head * 0 + col
    of_x = row * x_row + head * (2 * HALF) + col
    first = tl.load(x_ptr + of_x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + of_x + HALF, mask=inside, other=0.0).to(tl.float32)
    inverse = _inverse_rms(first, second, width, eps, PER_HEAD)
    first *= inverse * tl.load(weight_ptr + of_weight, mask=inside, other=0.0).to(tl.float32)
    second *= inverse * tl.load(weight_ptr + of_weight + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    tl.store(out_ptr + place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + place + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate_backward(
    x_ptr, weight_ptr, grad_ptr, dx_ptr, dweight_ptr, cos_ptr, sin_ptr, num_rows, length, heads, x_row, table_batch,
    table_row, grad_batch, grad_position, grad_head, width, eps,
    HALF: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, col = tl.arange(0, HEADS)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    is_weight = (head < heads) & (col < HALF)
    of_weight = col + head * (0 if PER_HEAD else 2 * HALF)
    weight1 = tl.load(weight_ptr + of_weight, mask=is_weight, other=0.0).to(tl.float32)
    weight2 = tl.load(weight_ptr + of_weight + HALF, mask=is_weight, other=0.0).to(tl.float32)
    dweight1 = tl.zeros([ROWS, HEADS, BLOCK], tl.float32)
    dweight2 = tl.zeros([ROWS, HEADS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        inside = (row < num_rows) & is_weight
        place = (row * heads + head) * (2 * HALF) + col
        batch, position = row // length, row % length
        angle = batch * table_batch + position * table_row + head * 0 + col
        of_grad = batch * grad_batch + position * grad_position + head * grad_head + col
        of_x = row * x_row + head * (2 * HALF) + col
        first = tl.load(x_ptr + of_x, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + of_x + HALF, mask=inside, other=0.0).to(tl.float32)
        out1 = tl.load(grad_ptr + of_grad, mask=inside, other=0.0).to(tl.float32)
        out2 = tl.load(grad_ptr + of_grad + HALF, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
        grad1, grad2 = out1 * cos + out2 * sin, out2 * cos - out1 * sin
        inverse = _inverse_rms(first, second, width, eps, PER_HEAD)
        first, second = first * inverse, second * inverse
        dweight1 += grad1 * first
        dweight2 += grad2 * second
        grad1, grad2 = grad1 * weight1, grad2 * weight2
        along = tl.sum(grad1 * first + grad2 * second, 2)
        if not PER_HEAD:
            along = tl.sum(along, 1)[:, None]
        along = (along / width)[:, :, None]
        tl.store(dx_ptr + place, ((grad1 - first * along) * inverse).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + place + HALF, ((grad2 - second * along) * inverse).to(dx_ptr.dtype.element_ty), mask=inside)
    own = dweight_ptr + tl.program_id(0).to(tl.int64) * width
    if PER_HEAD:
        col = tl.arange(0, BLOCK)
        tl.store(own + col, tl.sum(tl.sum(dweight1, 0), 0), mask=col < HALF)
        tl.store(own + HALF + col, tl.sum(tl.sum(dweight2, 0), 0), mask=col < HALF)
    else:
        place = tl.arange(0, HEADS)[:, None] * (2 * HALF) + tl.arange(0, BLOCK)[None, :]
        mask = (tl.arange(0, HEADS) < heads)[:, None] & (tl.arange(0, BLOCK) < HALF)[None, :]
        tl.store(own + place, tl.sum(dweight1, 0), mask=mask)
        tl.store(own + place + HALF, tl.sum(dweight2, 0), mask=mask)


def _most_programs(device: torch.device) -> int:
    return _PROGRAMS * tiles.hardware(device).processors


def _warps(elements: int) -> int:
    return min(16, max(4, elements // 512))


def add_rms_norm(x_NW: Tensor, y_NW: Tensor | None, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (without y: x) and its norm; all rows contiguous."""
    rows, width = x_NW.shape
    block = triton.next_power_of_2(width)
    tile, out = max(1, _TILE // block), torch.empty_like(x_NW)
    total = x_NW if y_NW is None else torch.empty_like(x_NW)
    _rms_norm[(triton.cdiv(rows, tile),)](
        x_NW, y_NW, weight_W, total, out, rows, width, eps,
        ADDS=y_NW is not None, ROWS=tile, BLOCK=block, num_warps=_warps(tile * block),
    )  # fmt: skip
    return total, out


def rms_norm_backward(
    x_NW: Tensor, weight_W: Tensor, grad_NW: Tensor, along_NW: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows, plus ``along_NW``, and of the weight; all contiguous."""
    rows, width = x_NW.shape
    block = triton.next_power_of_2(width)
    tile, dx = max(1, _TILE_BACKWARD // block), torch.empty_like(x_NW)
    programs = min(triton.cdiv(rows, tile), _most_programs(x_NW.device))
    dweight_PW = torch.empty((programs, width), dtype=torch.float32, device=x_NW.device)
    _rms_norm_backward[(programs,)](
        x_NW, weight_W, grad_NW, along_NW, dx, dweight_PW, rows, width, eps,
        ADDS=along_NW is not None, ROWS=tile, BLOCK=block, num_warps=_warps(tile * block),
    )  # fmt: skip
    return dx, dweight_PW.sum(0).to(weight_W.dtype)


def norm_rotate(x_BSHd: Tensor, weight_W: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B, S, H, d], contiguous but for gaps between rows, normed and rotated; without gaps."""
    out = x_BSHd.new_empty(x_BSHd.shape)
    arguments, options, rows = _heads(x_BSHd, weight_W, cos)
    _norm_rotate[(triton.cdiv(rows, options["ROWS"]),)](
        x_BSHd, weight_W, out, cos, sin, *arguments, len(weight_W), eps, **options
    )
    return out


def norm_rotate_backward(
    x_BSHd: Tensor, weight_W: Tensor, grad_BHSd: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x, without gaps, and of the weight; the last dimension of the incoming one has stride 1."""
    dx = x_BSHd.new_empty(x_BSHd.shape)
    arguments, options, rows = _heads(x_BSHd, weight_W, cos)
    programs = min(triton.cdiv(rows, options["ROWS"]), _most_programs(x_BSHd.device))
    dweight_PW = torch.empty((programs, len(weight_W)), dtype=torch.float32, device=x_BSHd.device)
    strides = [grad_BHSd.stride(dim) for dim in (0, 2, 1)]
    _norm_rotate_backward[(programs,)](
        x_BSHd, weight_W, grad_BHSd, dx, dweight_PW, cos, sin, *arguments, *strides, len(weight_W), eps, **options
    )
    return dx, dweight_PW.sum(0).to(weight_W.dtype)


def _heads(x_BSHd: Tensor, weight_W: Tensor, cos: Tensor) -> tuple[list[int], dict[str, int | bool], int]:
    """Arguments that both directions share, options of their tiles, and the number of rows."""
    batch, length, heads, width = x_BSHd.shape
    half = width // 2
    padded_heads, block = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    tile = max(1, _TILE // (2 * padded_heads * block))
    options: dict[str, int | bool] = {"HALF": half, "PER_HEAD": len(weight_W) == width, "ROWS": tile}
    options |= {"HEADS": padded_heads, "BLOCK": block, "num_warps": _warps(2 * tile * padded_heads * block)}
    table_batch = cos.stride(0) if cos.dim() == 4 else 0
    x_row = x_BSHd.stride(1 if length > 1 else 0)
    return [batch * length, length, heads, x_row, table_batch, cos.stride(-2)], options, batch * length
