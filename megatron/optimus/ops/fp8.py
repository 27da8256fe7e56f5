"""Linear layers and the SwiGLU MLP with float8 products: forward in e4m3, gradients in e5m2 ("hybrid").

Each matrix that a product reads gets one scale when it is made, its largest magnitude divided by the format's largest
number: nothing of earlier steps enters, so nothing has to be saved. float8 products of Hopper GPUs need both operands
contiguous along the summed dimension, so a matrix is quantized together with its transpose. Weights are quantized once
a step (``constant_weights``). Sums are in fp32, results in 16 bits.

On the CPU the same numbers are multiplied in fp32, which is what the tests compare with and nobody trains with.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
Shapes: T tokens, D width of the input, N of the output, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.optimus.ops.autograd_guards import first_derivative_only, refuse_tangents, reverse_mode_only

_Made = TypeVar("_Made")

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # elements: what the products ask of every dimension that is summed over, and of a weight's


@dataclass(frozen=True)
class Float8Matrix:
    """A matrix [T, N], rounded, as ``rows`` * ``scale``.

    Attributes:
        rows: float8 [T, N].
        columns: float8 [N, T'], the transpose; T' is T rounded up to a multiple of ALIGNMENT, by zeros.
        scale: fp32 scalar.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


_kept: dict[tuple[int, ...], Any] | None = None  # quantized weights, by the addresses of what they are made of


@contextmanager
def constant_weights() -> Iterator[None]:
    """Inside, weights do not change, and each is quantized once, for all micro-batches. It costs a byte a parameter."""
    global _kept  # noqa: PLW0603  one step runs at a time
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def kept(weights: Sequence[Tensor], make: Callable[[], _Made]) -> _Made:
    """Returns what ``make`` makes of weights, from an earlier call of this step where they are constant."""
    if _kept is None:
        return make()
    key = tuple(weight.data_ptr() for weight in weights)
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


def kept_so_far() -> dict[tuple[int, ...], Any]:
    """Returns what this step has kept until now, for ``keep``; nothing outside of ``constant_weights``."""
    return dict(_kept or {})


def keep(made: dict[tuple[int, ...], Any]) -> None:
    """Keeps, for the rest of this step, what a replayed graph has just written again."""
    if _kept is not None:
        _kept.update(made)


def check_device(device: torch.device, params_dtype: torch.dtype) -> None:
    """Raises ValueError where there are no float8 products: on GPUs older than Ada and Hopper, and on other devices."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(f"fp8=hybrid needs an NVIDIA GPU of compute capability 8.9 or newer, this is {name}; use none")
    if params_dtype != torch.bfloat16:
        raise ValueError(f"fp8=hybrid needs params_dtype=bf16, this run has {params_dtype}".replace("torch.", ""))


def linear(x_TD: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Multiplies one input by several weights, with one scale for all of them.

    Args:
        x_TD: bf16 (CPU: any floating) [..., D].
        weights: [N, D] each, of x's dtype; D and N are multiples of ALIGNMENT.

    Returns:
        x @ weight.T [..., N] of each, in x's dtype: views of one tensor, with gaps between their rows.

    Raises:
        ValueError: a width is no multiple of ALIGNMENT.
        RuntimeError: forward-mode AD.
    """
    _check(x_TD, weights)
    outputs = _Linear.apply(x_TD.reshape(-1, x_TD.shape[-1]), *weights)
    return tuple(y_TN.view(*x_TD.shape[:-1], y_TN.shape[-1]) for y_TN in outputs)


def mlp(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """SwiGLU MLP, down(silu(gate(x)) * up(x)); what lies between the products is written in float8 alone.

    Args:
        x_TD: bf16 (CPU: any floating) [..., D].
        gate_FD: weight of x's dtype; D and F are multiples of ALIGNMENT.
        up_FD: likewise.
        down_DF: likewise.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: a width is no multiple of ALIGNMENT.
        RuntimeError: forward-mode AD.
    """
    _check(x_TD, (gate_FD, up_FD, down_DF))
    return _Mlp.apply(x_TD.reshape(-1, x_TD.shape[-1]), gate_FD, up_FD, down_DF).view(x_TD.shape)


def quantize(parts: Sequence[Tensor], dtype: torch.dtype, dim: int = 1) -> Float8Matrix:
    """Quantizes matrices that lie beside (``dim`` 1) or below (0) each other, with one scale.

    Args:
        parts: floating matrices with stride 1 in the last dimension.
        dtype: FORWARD or GRADIENT.
        dim: along which they are joined.
    """
    rows = parts[0].shape[0] if dim == 1 else sum(part.shape[0] for part in parts)
    columns = parts[0].shape[1] if dim == 0 else sum(part.shape[1] for part in parts)
    if not parts[0].is_cuda:
        return _rounded(torch.cat([part.float() for part in parts], dim), dtype)
    from megatron.optimus.ops.triton import fp8

    out, largest = _empty(rows, columns, dtype, parts[0].device)
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    for part in parts:
        fp8.largest_(largest, part, part.shape[1])
    start = 0
    for part in parts:
        stop = start + part.shape[dim]
        to = out.rows[:, start:stop] if dim == 1 else out.rows[start:stop]
        end = out.columns.shape[1] if stop == rows else stop  # the last part below the others writes the zeros
        to_columns = out.columns[start:stop] if dim == 1 else out.columns[:, start:end]
        fp8.quantize_(to, to_columns, out.scale, largest, part, part.shape[1])
        start = stop
    return out


def quantize_swiglu(gate_up_T2F: Tensor) -> Float8Matrix:
    """Quantizes silu(gate) * up [T, F] to FORWARD from gate and up side by side, contiguous."""
    if not gate_up_T2F.is_cuda:
        gate, up = gate_up_T2F.float().chunk(2, -1)
        return _rounded(torch.nn.functional.silu(gate) * up, FORWARD)
    from megatron.optimus.ops.triton import fp8

    rows, inner = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out, largest = _empty(rows, inner, FORWARD, gate_up_T2F.device)
    fp8.largest_(largest, gate_up_T2F, inner, swiglu=True)
    fp8.quantize_(out.rows, out.columns, out.scale, largest, gate_up_T2F, inner, swiglu=True)
    return out


def quantize_swiglu_gradient(gate_up_T2F: Tensor, grad_TF: Tensor) -> Float8Matrix:
    """Quantizes the gradient of gate and up [T, 2F] to GRADIENT, given that of silu(gate) * up; both contiguous."""
    if not gate_up_T2F.is_cuda:
        gate, up = gate_up_T2F.float().chunk(2, -1)
        sigmoid, grad = torch.sigmoid(gate), grad_TF.float()
        silu = gate * sigmoid
        return _rounded(torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), -1), GRADIENT)
    from megatron.optimus.ops.triton import fp8

    rows, inner = grad_TF.shape
    out, largest = _empty(rows, 2 * inner, GRADIENT, grad_TF.device)
    fp8.largest_(largest, gate_up_T2F, inner, grad_TF, swiglu=True)
    fp8.quantize_(out.rows, out.columns, out.scale, largest, gate_up_T2F, inner, grad_TF, swiglu=True)
    return out


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T of float8 matrices [M, K] and [N, K], times both scales, in ``dtype``.

    The forward sums in the tensor cores' own 22 bits; gradients, whose sums are over all tokens, in fp32.
    """
    if not a.is_cuda:
        return ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(dtype)
    is_forward = a.dtype == b.dtype == FORWARD
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=is_forward)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x, weight = quantize([x_TD], FORWARD), _quantized_weights(weights)
        y_TN = product(x.rows, x.scale, weight.rows, weight.scale, x_TD.dtype)
        # The weights themselves only so that a second derivative is refused.
        ctx.save_for_backward(x.columns, x.scale, weight.columns, weight.scale, *weights)
        ctx.widths = [one.shape[0] for one in weights]
        return y_TN.split(ctx.widths, dim=1)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("fp8.linear")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_scale, weight_columns, weight_scale = ctx.saved_tensors[:4]
        dy, dtype = quantize(grads, GRADIENT), grads[0].dtype
        dx_TD = product(dy.rows, dy.scale, weight_columns, weight_scale, dtype) if ctx.needs_input_grad[0] else None
        dweights = product(dy.columns, dy.scale, x_columns, x_scale, dtype).split(ctx.widths)
        return dx_TD, *dweights


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        x, gate_up = quantize([x_TD], FORWARD), _quantized_weights([gate_FD, up_FD])
        hidden_T2F = product(x.rows, x.scale, gate_up.rows, gate_up.scale, x_TD.dtype)
        activation, down = quantize_swiglu(hidden_T2F), _quantized_weights([down_DF])
        ctx.save_for_backward(
            x.columns, x.scale, gate_up.columns, gate_up.scale, hidden_T2F,
            activation.columns, activation.scale, down.columns, down.scale, gate_FD, up_FD, down_DF,
        )  # fmt: skip
        return product(activation.rows, activation.scale, down.rows, down.scale, x_TD.dtype)

    @staticmethod
    @first_derivative_only
    @reverse_mode_only("fp8.mlp")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_scale, gate_up_columns, gate_up_scale, hidden_T2F, *others = ctx.saved_tensors[:9]
        activation_columns, activation_scale, down_columns, down_scale = others
        [grad], dtype = grads, grads[0].dtype
        dy = quantize([grad], GRADIENT)
        dactivation_TF = product(dy.rows, dy.scale, down_columns, down_scale, dtype)
        ddown = product(dy.columns, dy.scale, activation_columns, activation_scale, dtype)
        dhidden = quantize_swiglu_gradient(hidden_T2F, dactivation_TF)
        needs_dx = ctx.needs_input_grad[0]
        dx = product(dhidden.rows, dhidden.scale, gate_up_columns, gate_up_scale, dtype) if needs_dx else None
        dgate, dup = product(dhidden.columns, dhidden.scale, x_columns, x_scale, dtype).chunk(2)
        return dx, dgate, dup, ddown


def _quantized_weights(weights: Sequence[Tensor]) -> Float8Matrix:
    return kept(weights, lambda: quantize(weights, FORWARD, dim=0))


def _check(x: Tensor, weights: Sequence[Tensor]) -> None:
    refuse_tangents("fp8", x, *weights)
    for weight in weights:
        if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT:
            raise ValueError(f"fp8: a weight {tuple(weight.shape)}; both widths must be multiples of {ALIGNMENT}")


def _empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Float8Matrix, Tensor]:
    """Returns a matrix without values, and the zero that its kernels raise to the largest magnitude."""
    largest = torch.zeros((), device=device)
    return Float8Matrix(
        torch.empty(rows, columns, dtype=dtype, device=device),
        torch.empty(columns, -(-rows // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device),
        torch.empty_like(largest),
    ), largest


def _rounded(values: Tensor, dtype: torch.dtype) -> Float8Matrix:
    """``quantize`` in plain PyTorch."""
    limit = torch.finfo(dtype).max
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    largest = torch.where(largest == 0, limit, largest)
    rows = (values * (limit / largest)).to(dtype)
    padding = -rows.shape[0] % ALIGNMENT
    columns = torch.nn.functional.pad(rows.float().t(), (0, padding)).to(dtype)
    return Float8Matrix(rows, columns, largest / limit)
