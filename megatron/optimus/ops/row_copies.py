"""Rows copied to several positions, and the sum of a row's copies: each is the other's gradient.

Token dispatchers send a token to the ranks of its experts and sum what comes back. ``positions`` [T, P], int32, hold
the index of a row's copy for each of P destinations among all S copies, -1 for none; each of 0..S-1 occurs once.
Neither operation sorts, uses atomics or needs the host, and both give the same bits in every run. Positions are checked
on the CPU; on a GPU, where that would mean waiting, they are trusted.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.optimus.ops import reference
from megatron.optimus.ops.autograd_guards import (
    can_be_read,
    carries_tangent,
    first_derivative_only,
    is_shape_only,
    refuse_tangents,
)
from megatron.optimus.ops.backend import Backend, kernels, resolve_routing


def copy_rows(x_TD: Tensor, positions_TP: Tensor, num_copies: int) -> Tensor:
    """Copies each row to each of its positions; the gradient is ``sum_copies``.

    Args:
        x_TD: rows [T, D], floating.
        positions_TP: int32 [T, P] on the rows' device; -1 for none.
        num_copies: S.

    Returns:
        [S, D] in x's dtype.

    Raises:
        ValueError: positions are not int32 [T, P] on the rows' device or, on the CPU, hold anything but each of 0..S-1
            once and -1.
    """
    _check("copy_rows", x_TD, positions_TP)
    if positions_TP.shape[0] != x_TD.shape[0]:
        raise ValueError(f"copy_rows: positions {tuple(positions_TP.shape)} of {x_TD.shape[0]} rows; expected [T, P]")
    _check_values("copy_rows", positions_TP, num_copies)
    if carries_tangent(x_TD):
        return _copy(x_TD, positions_TP, num_copies)
    return _CopyRows.apply(x_TD, positions_TP, num_copies)


def sum_copies(y_SD: Tensor, positions_TP: Tensor) -> Tensor:
    """Sums each row's copies, in the order of P and in at least fp32, rounded once; the gradient is ``copy_rows``.

    Args:
        y_SD: copies [S, D], floating.
        positions_TP: int32 [T, P] on the copies' device; -1 for none.

    Returns:
        [T, D] in y's dtype.

    Raises:
        ValueError: as for ``copy_rows``.
    """
    _check("sum_copies", y_SD, positions_TP)
    _check_values("sum_copies", positions_TP, y_SD.shape[0])
    if carries_tangent(y_SD):
        return _sum(y_SD, positions_TP)
    return _SumCopies.apply(y_SD, positions_TP)


def _check(name: str, rows: Tensor, positions: Tensor) -> None:
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name}: rows {rows.dtype} {tuple(rows.shape)}; expected a floating dtype and two dimensions")
    if positions.dim() != 2 or positions.dtype != torch.int32 or positions.device != rows.device:
        raise ValueError(
            f"{name}: positions {positions.dtype} {tuple(positions.shape)} on {positions.device}; expected int32 "
            f"[T, P] on {rows.device}"
        )


def _check_values(name: str, positions: Tensor, num_copies: int) -> None:
    if positions.device.type != "cpu" or not can_be_read(positions):
        return
    used = positions[positions != -1]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_copies:
        wrong = used[(used < 0) | (used >= num_copies)][0]
        raise ValueError(f"{name}: positions hold {int(wrong)}; expected values in [-1, {num_copies})")
    times = torch.bincount(used, minlength=num_copies)
    if (times != 1).any():
        index = int((times != 1).nonzero()[0])
        raise ValueError(
            f"{name}: positions hold {index} {int(times[index])} times; expected each of {num_copies} once"
        )


def _kernels(rows: Tensor, name: str) -> ModuleType | Any:
    """The module that has ``name`` for these rows: kernels take all dtypes up to fp32, as router weights are fp32."""
    backend = resolve_routing(rows.device)
    if backend == Backend.REFERENCE or rows.dtype is torch.float64 or not hasattr(kernels(backend), name):
        return reference
    if is_shape_only(rows):
        return reference  # for shapes: some kernels here are no operations of torch
    refuse_tangents(name, rows)
    return kernels(backend)


def _copy(x: Tensor, positions: Tensor, num_copies: int) -> Tensor:
    return _kernels(x, "copy_rows").copy_rows(x.contiguous(), positions.contiguous(), num_copies)


def _sum(y: Tensor, positions: Tensor) -> Tensor:
    return _kernels(y, "sum_copies").sum_copies(y.contiguous(), positions.contiguous())


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, num_copies: int) -> Tensor:
        ctx.save_for_backward(positions)
        return _copy(x, positions, num_copies)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return _sum(grads[0], positions), None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_copies = y.shape[0]
        return _sum(y, positions)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        return _copy(grads[0], positions, ctx.num_copies), None
