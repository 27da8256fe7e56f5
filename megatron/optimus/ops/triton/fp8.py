# mypy: disable-error-code=no-untyped-def
"""Kernels that quantize to float8: the largest magnitude in one pass, values and their transpose in another.

The values are those of a matrix, or of SwiGLU (or its gradient), which is then computed in both passes instead of being
written in 16 bits between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.optimus.ops.triton.tiles import ROW_TILE

_ROWS, _COLUMNS = 128, 128  # of a program's tile
_META = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 8}


@triton.jit
def swiglu(x_ptr, place, columns, inside):
    """silu(gate) * up in fp32; up lies ``columns`` after gate."""
    gate = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + columns, mask=inside, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_gradient(gate, up, grad):
    """Gradients of gate and up."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu


@triton.jit
def inverse_scale(largest_ptr, scale_ptr, LIMIT: tl.constexpr, is_writer):
    """What values are multiplied by; one program writes its inverse, the scale."""
    largest = tl.load(largest_ptr)
    largest = tl.where(largest == 0.0, LIMIT, largest)
    if is_writer:
        tl.store(scale_ptr, largest / LIMIT)
    return LIMIT / largest


@triton.jit
def store_transposed(values, row, col, rows, columns, columns_ptr, stride):
    """Stores a tile's transpose."""
    row, col = tl.trans(row), tl.trans(col).to(tl.int64)
    # Does nothing, but parts this conversion to float8 from that of the same values by rows: where both were one,
    # Triton 3.6 stored a third of the elements in the wrong place.
    values = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=False, pack=1
    )  # fmt: skip
    dtype = columns_ptr.dtype.element_ty
    tl.store(columns_ptr + col * stride + row, tl.trans(values).to(dtype), mask=(row < rows) & (col < columns))


@triton.jit
def _largest(
    x_ptr, grad_ptr, largest_ptr, num_tiles_ptr, rows, columns, stride, SWIGLU: tl.constexpr, GRADIENT: tl.constexpr,
    LIMITED: tl.constexpr, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raises the number at ``largest_ptr`` to the largest magnitude of the tile's values."""
    if LIMITED:
        rows = tl.load(num_tiles_ptr) * ROW_TILE
    if tl.program_id(0) * ROWS < rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (col < columns)
        place = row * stride + col
        if GRADIENT:
            gate = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x_ptr + place + columns, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
            first, second = swiglu_gradient(gate, up, grad)
            values = tl.maximum(tl.abs(first), tl.abs(second))
        elif SWIGLU:
            values = tl.abs(swiglu(x_ptr, place, columns, inside))
        else:
            values = tl.abs(tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32))
        tl.atomic_max(largest_ptr, tl.max(tl.max(values, 1), 0))


@triton.jit
def _quantize(
    x_ptr, grad_ptr, largest_ptr, scale_ptr, rows_ptr, columns_ptr, num_tiles_ptr, rows, columns, padded_rows,
    stride, rows_stride, columns_stride, batch, columns_batch, LIMIT: tl.constexpr,
    SWIGLU: tl.constexpr, GRADIENT: tl.constexpr, WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr,
    LIMITED: tl.constexpr, ROW_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of values / scale and its transpose; scale = largest / LIMIT. A row beyond ``rows`` is zeros."""
    number = tl.program_id(2).to(tl.int64)
    is_writer = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (number == 0)
    inverse = inverse_scale(largest_ptr, scale_ptr, LIMIT, is_writer)
    if LIMITED:
        rows = tl.load(num_tiles_ptr) * ROW_TILE
        padded_rows = rows
    if tl.program_id(0) * ROWS < padded_rows:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (col < columns)
        place = number * batch + row * stride + col
        rows_place = rows_ptr + number * batch + row * rows_stride + col
        columns_ptr += number * columns_batch
        dtype = rows_ptr.dtype.element_ty
        if GRADIENT:
            gate = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x_ptr + place + columns, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * columns + col, mask=inside, other=0.0).to(tl.float32)
            values, second = swiglu_gradient(gate, up, grad)
            second *= inverse
            tl.store(rows_place + columns, second.to(dtype), mask=inside)
            ups_ptr = columns_ptr + columns.to(tl.int64) * columns_stride
            store_transposed(second, row, col, padded_rows, columns, ups_ptr, columns_stride)
        elif SWIGLU:
            values = swiglu(x_ptr, place, columns, inside)
        else:
            values = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        values *= inverse
        if WITH_ROWS:
            tl.store(rows_place, values.to(dtype), mask=inside)
        if WITH_COLUMNS:
            store_transposed(values, row, col, padded_rows, columns, columns_ptr, columns_stride)


def largest_(
    largest: Tensor, x_TN: Tensor, columns: int, grad_TF: Tensor | None = None, num_tiles: Tensor | None = None,
    *, swiglu: bool = False,
) -> None:  # fmt: skip
    """Raises ``largest`` (fp32 scalar) to the largest magnitude; arguments as of ``quantize_``."""
    rows = x_TN.shape[0]
    _largest[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        x_TN, x_TN if grad_TF is None else grad_TF, largest, num_tiles, rows, columns, x_TN.stride(0), SWIGLU=swiglu,
        GRADIENT=grad_TF is not None, LIMITED=num_tiles is not None, ROW_TILE=ROW_TILE, **_META,
    )  # fmt: skip


def quantize_(
    rows: Tensor | None, columns: Tensor | None, scale: Tensor, largest: Tensor, x_TN: Tensor, num_columns: int,
    grad_TF: Tensor | None = None, num_tiles: Tensor | None = None, *, swiglu: bool = False,
) -> None:  # fmt: skip
    """Writes values / scale and their transpose.

    Args:
        rows: float8 [T, C], with stride 1 in the last dimension; for matrices [E, T, C], contiguous. None: not wanted.
        columns: float8 [C, T'], with stride 1 in the last dimension; T' - T columns of zeros; or [E, C, T]. None: not
            wanted.
        scale: fp32 scalar, is written: ``largest`` divided by float8's largest number, 1 for zeros.
        largest: fp32 scalar, the largest magnitude of what is quantized by this scale.
        x_TN: the values [T, C] or [E, T, C], or with ``swiglu`` gate and up [T, 2C], stride 1 in the last dimension.
        num_columns: C; with ``grad_TF`` half of the columns written.
        grad_TF: gradient of SwiGLU's output, contiguous: the values are those of its inputs [T, 2C].
        num_tiles: int32 [1] on the device; rows after so many tiles of ROW_TILE are left alone.
        swiglu: whether ``x_TN`` is gate and up.
    """
    out = rows if rows is not None else columns
    assert out is not None, "one of them is wanted"
    num_rows, count = x_TN.shape[-2], x_TN.shape[0] if x_TN.dim() == 3 else 1
    padded = num_rows if columns is None else columns.shape[-1]
    _quantize[(triton.cdiv(padded, _ROWS), triton.cdiv(num_columns, _COLUMNS), count)](
        x_TN, x_TN if grad_TF is None else grad_TF, largest, scale, out, out if columns is None else columns, num_tiles,
        num_rows, num_columns, padded, x_TN.stride(-2), out.stride(-2), 0 if columns is None else columns.stride(-2),
        x_TN.stride(0), 0 if columns is None else columns.stride(0), LIMIT=torch.finfo(out.dtype).max, SWIGLU=swiglu,
        GRADIENT=grad_TF is not None, WITH_ROWS=rows is not None, WITH_COLUMNS=columns is not None,
        LIMITED=num_tiles is not None, ROW_TILE=ROW_TILE, **_META,
    )  # fmt: skip
