"""RMSNorm, alone, with a sum before it and with the rotary embedding: values and gradients against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.optimus import ops
from tests.ops.test_elementwise import close, each, each_dtype, made, table, turned

EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@each
@each_dtype
@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (2, 5, 410), (300, 64), (3, 2048), (2, 5000)], ids=str)
def test_rms_norm(backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ops.set_backend(backend)
    x, grad = (3 * made(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = 1 + made(shape[-1], dtype=dtype, device=device, seed=2)
    leaves = x.requires_grad_(), weight.requires_grad_()
    out = ops.rms_norm(*leaves, EPS)
    dx, dweight = torch.autograd.grad(out, leaves, grad)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    want = normed(*exact)
    want_dx, want_dweight = torch.autograd.grad(want, exact, grad.double().cpu())
    for got, wanted in ((out, want), (dx, want_dx), (dweight, want_dweight)):
        close(got, wanted, dtype)


@each
@each_dtype
@pytest.mark.parametrize("shape", [(1, 5), (2, 5, 410), (300, 64), (3, 2048)], ids=str)
@pytest.mark.parametrize("used", ["sum and norm", "norm", "sum"])
@pytest.mark.parametrize("adds", [True, False], ids=["two", "one"])
def test_sum_and_norm(
    backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], used: str, adds: bool
) -> None:
    ops.set_backend(backend)
    x, y, *grads = (3 * made(*shape, dtype=dtype, device=device, seed=seed) for seed in range(4))
    if adds:  # a part of a wider row
        y = torch.cat((y, y), -1)[..., : shape[-1]]
    weight = 1 + made(shape[-1], dtype=dtype, device=device, seed=4)
    leaves = [leaf.requires_grad_() for leaf in ((x, y, weight) if adds else (x, weight))]
    outputs = ops.add_rms_norm(x, y if adds else None, weight, EPS)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    # The sum is rounded before its norm: so is the exact one, with the gradient of the sum.
    rounded = (x.detach() + y.detach() if adds else x.detach()).double().cpu()
    total = exact[0] + exact[1] if adds else exact[0]
    total = total + (rounded - total).detach()
    wants = [total, normed(total, exact[-1])]
    close(outputs[0], wants[0], dtype)
    close(outputs[1], wants[1], dtype)
    picks = [index for index, name in enumerate(("sum", "norm")) if name in used]
    got = torch.autograd.grad([outputs[i] for i in picks], leaves, [grads[i] for i in picks], allow_unused=True)
    want = torch.autograd.grad(
        [wants[i] for i in picks], exact, [grads[i].double().cpu() for i in picks], allow_unused=True
    )
    for one, wanted in zip(got, want, strict=True):
        assert (one is None) == (wanted is None)
        if one is not None:
            close(one, wanted, dtype)


@each
@each_dtype
@pytest.mark.parametrize("per_head", [True, False], ids=["each head", "all heads"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (2, 5, 3, 8), (3, 9, 2, 20), (1, 33, 4, 64), (2, 150, 2, 32)], ids=str)
@pytest.mark.parametrize(
    "layout", ["positions first", "heads first", "gaps", "gaps between rows", "a table a sequence"]
)
def test_norm_and_rotation(
    backend: str, device: str, dtype: torch.dtype, per_head: bool, shape: tuple[int, ...], layout: str
) -> None:
    ops.set_backend(backend)
    batch, length, heads, width = shape
    if layout == "gaps":  # a part of a wider row
        x = made(batch, length, heads, 3 * width, dtype=dtype, device=device)[..., width : 2 * width]
    elif layout == "gaps between rows":  # as float8 projections leave it
        x = made(batch, length, 3 * heads, width, dtype=dtype, device=device)[:, :, heads : 2 * heads]
    else:
        x = made(*shape, dtype=dtype, device=device)
    weight = 1 + made(width if per_head else heads * width, dtype=dtype, device=device, seed=2)
    cos, sin = table(length, width, batch if layout == "a table a sequence" else 0, device)
    grad = made(batch, heads, length, width, dtype=dtype, device=device, seed=1)
    if layout == "positions first":  # as attention returns it
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = x.detach().requires_grad_(), weight.requires_grad_()
    out = ops.norm_rotate(*leaves, EPS, cos, sin)
    assert out.transpose(1, 2).is_contiguous() and out.shape == grad.shape
    dx, dweight = torch.autograd.grad(out, leaves, grad)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    rows = exact[0] if per_head else exact[0].flatten(-2)
    want = turned(normed(rows, exact[1]).view(shape).transpose(1, 2), cos.double().cpu(), sin.double().cpu())
    want_dx, want_dweight = torch.autograd.grad(want, exact, grad.double().cpu())
    for got, wanted in ((out, want), (dx, want_dx), (dweight, want_dweight)):
        close(got, wanted, dtype)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(2, 3, 4, 8), torch.ones(8)
    tables = torch.ones(3, 8), torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"rms_norm: x \(2, 3\) and weight \(8,\)"):
        ops.rms_norm(torch.ones(2, 3), weight, EPS)
    with pytest.raises(ValueError, match="rms_norm: the first argument is on cpu but another is on meta"):
        ops.rms_norm(x, weight.to("meta"), EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: x torch.float32 \(2, 3, 4, 8\) and y torch.float16 \(8,\)"):
        ops.add_rms_norm(x, weight.half(), weight, EPS)
    with pytest.raises(ValueError, match=r"add_rms_norm: x \(2, 3\) and weight \(8,\)"):
        ops.add_rms_norm(torch.ones(2, 3), None, weight, EPS)
    with pytest.raises(ValueError, match=r"expected \[B, S, H, d\] and \[d\] or \[H \* d\]"):
        ops.norm_rotate(x, torch.ones(16), EPS, *tables)
    with pytest.raises(ValueError, match=r"norm_rotate: x \(2, 4, 3, 8\), cos \(4, 8\)"):
        ops.norm_rotate(x, weight, EPS, torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"norm_rotate: torch\.int64; expected a floating dtype"):
        ops.norm_rotate(x.long(), weight, EPS, *tables)
