"""Rotary embedding, silu(gate) * up and the parts of the cross-entropy: values and gradients against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.optimus import ops
from megatron.optimus.layers.loss import linear_cross_entropy_sum
from megatron.optimus.ops import elementwise
from tests.ops.targets import ROUTER_TARGETS

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value
DTYPES = list(TOLERANCE)
each = pytest.mark.parametrize(("backend", "device"), [t for t in ROUTER_TARGETS if t.id in ("reference", "triton")])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def made(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1e-3, want.abs().max().item())


def table(length: int, width: int, batches: int, device: str) -> tuple[Tensor, Tensor]:
    """Angles that differ by position and, for several batches, by batch."""
    angle = made(max(batches, 1), 1, length, width // 2, dtype=torch.float32, device=device, seed=3)
    angle = torch.cat((angle, angle), -1)
    angle = angle if batches else angle[0, 0]
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos[..., :half], sin[..., :half])
    return torch.cat((pairs.real, pairs.imag), -1)


@each
@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 5, 8), (3, 2, 9, 20), (1, 4, 33, 64)], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "positions first", "gaps", "a table a sequence"])
def test_rotation(backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    ops.set_backend(backend)
    batch, heads, length, width = shape
    if layout == "positions first":  # as a projection leaves it
        x = made(batch, length, heads, width, dtype=dtype, device=device).transpose(1, 2)
    elif layout == "gaps":  # a part of a wider row
        x = made(batch, length, heads, 3 * width, dtype=dtype, device=device)[..., width : 2 * width].transpose(1, 2)
    else:
        x = made(*shape, dtype=dtype, device=device)
    cos, sin = table(length, width, batch if layout == "a table a sequence" else 0, device)
    grad = made(*shape, dtype=dtype, device=device, seed=1)
    x.requires_grad_()
    out = ops.rotate(x, cos, sin)
    (dx,) = torch.autograd.grad(out, x, grad)
    exact = x.detach().double().cpu().requires_grad_()
    want = turned(exact, cos.double().cpu(), sin.double().cpu())
    (want_dx,) = torch.autograd.grad(want, exact, grad.double().cpu())
    close(out, want, dtype)
    close(dx, want_dx, dtype)


@each
@each_dtype
@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 5, 410), (3, 2048)], ids=str)
def test_silu_mul(backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ops.set_backend(backend)
    gate, up, grad = (4 * made(*shape, dtype=dtype, device=device, seed=seed) for seed in range(3))
    leaves = gate.requires_grad_(), up.requires_grad_()
    out = ops.silu_mul(*leaves)
    got = torch.autograd.grad(out, leaves, grad)
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    want = F.silu(exact[0]) * exact[1]
    close(out, want, dtype)
    for mine, right in zip(got, torch.autograd.grad(want, exact, grad.double().cpu()), strict=True):
        close(mine, right, dtype)


@each
@each_dtype
@pytest.mark.parametrize("columns", [2, 37, 4096, 9000])
@pytest.mark.parametrize("z_loss_coeff", [0.0, 0.01])
def test_cross_entropy(backend: str, device: str, dtype: torch.dtype, columns: int, z_loss_coeff: float) -> None:
    ops.set_backend(backend)
    rows = 6
    logits = 5 * made(rows, columns, dtype=dtype, device=device)
    logits[1] += 80.0  # powers of which overflow
    logits[2, 0] = -float("inf")
    if columns > 4096:
        logits[3, :4096] = -float("inf")  # all that is read first
    labels = torch.tensor([0, columns - 1, columns // 2, columns - 1, 0, 0], device=device)
    here = torch.tensor([True, True, True, True, False, True], device=device)
    valid = torch.tensor([True, True, True, True, True, False], device=device)
    exact = logits.double()
    lse = ops.log_sum_exp(logits)
    torch.testing.assert_close(lse.double(), torch.logsumexp(exact, -1), rtol=1e-6, atol=1e-6)
    want = (exact - lse[:, None]).exp() * (1.0 + 2.0 * z_loss_coeff * lse[:, None])
    want[torch.arange(rows), labels] -= here.double()
    got = ops.cross_entropy_gradient_(logits, lse, labels, here, valid, z_loss_coeff)
    close(got, want * valid[:, None], dtype)


@each
@each_dtype
def test_the_loss_is_that_of_all_logits_at_once(
    backend: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, labels left out, values and both gradients; on the GPU and under the interpreter by the kernels."""
    monkeypatch.setattr("megatron.optimus.layers.loss.CHUNK_ELEMENTS", 4 * 50)
    ops.set_backend(backend)
    x = made(11, 16, dtype=dtype, device=device).requires_grad_()
    weight = made(50, 16, dtype=dtype, device=device, seed=1).requires_grad_()
    labels = torch.randint(50, (11,), generator=torch.Generator().manual_seed(2)).to(device)
    labels[[0, 7]] = -100
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    logits = exact[0] @ exact[1].t()
    rounded = logits + (logits.to(dtype).double() - logits).detach()  # as the kernels get them
    want = F.cross_entropy(rounded, labels, ignore_index=-100, reduction="sum")
    got = linear_cross_entropy_sum(x, weight, labels)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    scaled = zip(
        torch.autograd.grad(got, (x, weight), torch.tensor(0.3, device=device)),
        torch.autograd.grad(0.3 * want, exact),
        strict=True,
    )
    for mine, right in scaled:
        close(mine, right, dtype)


@each
def test_who_computes(backend: str, device: str) -> None:
    """The kernels where they are chosen; plain PyTorch for other dtypes and for nothing at all."""
    ops.set_backend(backend)
    one = torch.ones(1, device=device)
    assert (elementwise._kernels_for(one) is not None) == (backend == "triton")
    assert elementwise._kernels_for(one.double()) is None
    assert elementwise._kernels_for(one[:0]) is None


def test_what_does_not_fit_is_refused() -> None:
    cos, sin = table(4, 8, 0, "cpu")
    with pytest.raises(ValueError, match=r"rotate: x \(1, 2, 4, 6\)"):
        ops.rotate(torch.ones(1, 2, 4, 6), cos, sin)
    with pytest.raises(ValueError, match="even d"):
        ops.rotate(torch.ones(2, 4, 8), cos, sin)
    with pytest.raises(ValueError, match=r"rotate: x \(8,\)"):
        ops.rotate(torch.ones(8), cos, sin)
    with pytest.raises(ValueError, match="silu_mul: gate"):
        ops.silu_mul(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="silu_mul: gate"):
        ops.silu_mul(torch.ones(2), torch.ones(2).double())
    with pytest.raises(ValueError, match=r"cos \(3, 1, 4, 8\)"):  # of as many sequences, or one for all without [B, 1]
        ops.rotate(torch.ones(2, 1, 4, 8), *table(4, 8, 3, "cpu"))
    with pytest.raises(ValueError, match=r"cos \(1, 1, 4, 8\)"):
        ops.rotate(torch.ones(2, 1, 4, 8), *table(4, 8, 1, "cpu"))
    with pytest.raises(ValueError, match="on cpu but another is on"):
        ops.rotate(torch.ones(2, 1, 4, 8), cos.to("meta"), sin.to("meta"))
    with pytest.raises(ValueError, match="on cpu but another is on"):
        ops.silu_mul(torch.ones(2), torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"silu_mul: torch.int32; expected a floating"):
        ops.silu_mul(torch.ones(2).int(), torch.ones(2).int())
    with pytest.raises(ValueError, match=r"log_sum_exp: logits \(3,\)"):
        ops.log_sum_exp(torch.ones(3))
    logits, whole = torch.ones(3, 5), torch.ones(3, dtype=torch.bool)
    good = [torch.ones(3), torch.zeros(3, dtype=torch.int64), whole, whole]
    for place, wrong in ((0, torch.ones(2)), (1, torch.zeros(3).int()), (2, torch.ones(3)), (3, whole[:, None])):
        with pytest.raises(ValueError, match=r"cross_entropy_gradient_: logits \(3, 5\) with"):
            ops.cross_entropy_gradient_(logits, *good[:place], wrong, *good[place + 1 :], 0.0)
    with pytest.raises(ValueError, match="on cpu but another is on"):
        ops.cross_entropy_gradient_(logits, *good[:3], whole.to("meta"), 0.0)
