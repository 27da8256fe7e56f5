"""A router's product and its gradients by Triton, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.triton_cases import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton's interpreter, which keeps bf16 as bits and would multiply these."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(factor):
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        values = interpreter._convert_float(factor.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("shape", [(1, 8, 1), (70, 136, 20), (150, 130, 36), (70, 264, 96), (33, 40, 130)], ids=str)
def test_gradients_of_the_routers_product(shape: tuple[int, int, int]) -> None:
    """What is left where the first 8 bits cancel: so all parts of an fp32 gradient go into both products."""
    from megatron.optimus.ops.triton import router_linear

    tokens, width, experts = shape
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (tokens, experts))
    dlogits = torch.randn(tokens, experts, generator=generator)

    def close(got: Tensor, want: Tensor) -> bool:
        assert got.dtype == torch.bfloat16
        return bool((got.double().cpu() - want).norm() <= 2**-7 * want.norm())

    def parts_of(dlogits: Tensor) -> Tensor:
        """Of logits of which nothing else was made."""
        scores, nothing = torch.zeros(*dlogits.shape, device=DEVICE), torch.zeros(len(dlogits), 1, device=DEVICE)
        return router_linear.gradient_parts(scores, nothing.long(), nothing, None, dlogits.to(DEVICE), False, False)

    product = dlogits.double() @ weight.double()
    parts, there = parts_of(dlogits), weight.to(DEVICE)
    torch.testing.assert_close(parts.double().sum(1)[:, :experts].cpu(), dlogits.double(), rtol=2**-23, atol=1e-30)
    assert not parts[:, :, experts:].any()
    assert close(router_linear.input_gradient(parts, there, None), product)
    dx = -product.bfloat16()
    got = router_linear.input_gradient(parts, there, dx.to(DEVICE))
    assert close(got, product + dx.double())
    products = (
        torch.randn(3, 32 * -(-experts // 32), width, generator=generator)
        * torch.tensor([1.0, 2**-8, 2**-16])[:, None, None]
    )
    got = router_linear.sum_parts(products.flatten(0, 1).to(DEVICE), experts, torch.float32)
    torch.testing.assert_close(got.cpu().double(), products.double().sum(0)[:experts], rtol=1e-6, atol=1e-7)
    if INTERPRETED:
        return  # the weight's gradient is cuBLAS's product
    twice_x, both = torch.cat([x, x]), torch.cat([dlogits, -dlogits.bfloat16().float()])
    parts, twice_x = parts_of(both), twice_x.to(DEVICE)
    got = router_linear.weight_gradient(parts, twice_x, experts)
    assert close(got, both.double().T @ twice_x.double().cpu())
    assert torch.equal(got, router_linear.weight_gradient(parts, twice_x, experts))


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 2, 1), (70, 136, 20, 3), (200, 264, 96, 8)], ids=str)
def test_a_routers_product_and_its_choice(shape: tuple[int, int, int, int], biased: bool) -> None:
    """Logits as in fp64; all that is made of them has the bits that the choice alone makes of these logits."""
    from megatron.optimus.ops.triton import router, router_linear

    tokens, width, experts, topk = shape
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (tokens, experts))
    bias = torch.randn(experts, generator=generator).to(DEVICE) if biased else None
    *got, logits = router_linear.route(x.to(DEVICE), weight.to(DEVICE), topk, biased, True, bias)
    want = x.double() @ weight.double().T
    assert (logits.double().cpu() - want).norm() <= 1e-5 * want.norm()
    for a, b in zip(got, router.router_topk(logits, topk, biased, True, bias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
