# mypy: disable-error-code=no-untyped-def
"""Element-wise kernels of dense layers: rotary embedding, silu(gate) * up, and cross-entropy's two passes over logits.

Arithmetic in fp32, one rounding; every result is written once, by one program, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8  # of a program of the rotation
_BLOCK = 2048  # elements of a program of silu_mul
_COLUMNS = 4096  # of logits read at a time


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos_ptr, sin_ptr, num_rows, length, heads, table_batch, table_row,
    x_batch, x_position, x_head, out_batch, out_position, out_head,
    HALF: tl.constexpr, WIDTH: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotates pairs (i, i + HALF) of every head by their position's angle, or by the opposite angle."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    batch, position = row // length, row % length
    col = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (col < HALF)
    angle = (batch * table_batch + position * table_row)[:, None] + col
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    x_place = (batch * x_batch + position * x_position)[:, None] + col
    out_place = (batch * out_batch + position * out_position)[:, None] + col
    for _ in range(heads):
        first = tl.load(x_ptr + x_place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + x_place + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + out_place, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + out_place + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)
        x_place += x_head
        out_place += out_head


def rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``reference.rotate``; with ``inverse`` by the opposite angle, which is its gradient. The last dimension of x has
    stride 1; the result lies in memory as x does where that has no gaps."""
    batch, heads, length, width = x_BHSd.shape
    out = torch.empty_like(x_BHSd)
    rows, half = batch * length, width // 2
    table_batch = cos.stride(0) if cos.dim() == 4 else 0
    strides = [t.stride(dim) for t in (x_BHSd, out) for dim in (0, 2, 1)]
    _rotate[(triton.cdiv(rows, _ROWS),)](
        x_BHSd, out, cos, sin, rows, length, heads, table_batch, cos.stride(-2), *strides, HALF=half,
        WIDTH=triton.next_power_of_2(half), INVERSE=inverse, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward(gate_ptr, up_ptr, grad_ptr, dgate_ptr, dup_ptr, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + place, (grad * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of contiguous tensors."""
    out = torch.empty_like(gate)
    _silu_mul[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


def silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; all contiguous."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    blocks = triton.cdiv(gate.numel(), _BLOCK)
    _silu_mul_backward[(blocks,)](gate, up, grad, dgate, dup, gate.numel(), BLOCK=_BLOCK, num_warps=8)
    return dgate, dup


@triton.jit
def _log_sum_exp(logits_ptr, lse_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * columns + col, mask=col < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(logits, 0))
        # Rows of nothing but -inf so far would give NaN in both powers.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base), 0)
        largest = higher
    tl.store(lse_ptr + row, largest + tl.log(total))


@triton.jit
def _cross_entropy_gradient(
    logits_ptr, lse_ptr, labels_ptr, here_ptr, valid_ptr, columns, z_loss_coeff, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    label = tl.load(labels_ptr + row)
    here = tl.load(here_ptr + row) != 0
    valid = tl.load(valid_ptr + row) != 0
    scale = 1.0 + 2.0 * z_loss_coeff * lse
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < columns
        place = logits_ptr + row * columns + col
        grad = tl.exp(tl.load(place, mask=inside, other=0.0).to(tl.float32) - lse) * scale
        grad = tl.where((col == label) & here, grad - 1.0, grad)
        tl.store(place, tl.where(valid, grad, 0.0).to(logits_ptr.dtype.element_ty), mask=inside)


def log_sum_exp(logits_CV: Tensor) -> Tensor:
    """fp32 [C], of contiguous logits."""
    lse_C = torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    _log_sum_exp[(logits_CV.shape[0],)](logits_CV, lse_C, logits_CV.shape[1], BLOCK=_COLUMNS, num_warps=8)
    return lse_C


def cross_entropy_gradient_(
    logits_CV: Tensor, lse_C: Tensor, columns_C: Tensor, here_C: Tensor, valid_C: Tensor, z_loss_coeff: float
) -> Tensor:
    """``reference.cross_entropy_gradient_`` of contiguous logits."""
    _cross_entropy_gradient[(logits_CV.shape[0],)](
        logits_CV, lse_C, columns_C, here_C.to(torch.int8), valid_C.to(torch.int8), logits_CV.shape[1], z_loss_coeff,
        BLOCK=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return logits_CV
