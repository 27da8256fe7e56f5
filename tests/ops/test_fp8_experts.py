"""The expert layer in float8: the CPU's near the exact layer, a GPU's equal to the CPU's, also in main gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.optimus.ops import MainGrad, fp8_experts, reference
from tests.ops.targets import needs_hopper
from tests.ops.test_fp8 import relative


def case(tokens: int, width: int, inner: int, experts: int, topk: int, *, idle: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scores = made(tokens, experts)
    if idle:
        scores[:, 0] = -9  # an expert without rows
    indices = scores.topk(topk).indices.int()
    indices[::7, 0] = -1  # slots of experts on other ranks
    return {
        "x": made(tokens, width), "gate_up": made(experts, 2 * inner, width) * width**-0.5,
        "down": made(experts, width, inner) * inner**-0.5, "weights": torch.rand(tokens, topk, generator=generator),
        "indices": indices, "dy": made(tokens, width),
    }  # fmt: skip


CASES = [(40, 64, 32, 4, 2), (300, 144, 272, 6, 3), (1, 16, 16, 2, 1), (513, 256, 128, 8, 4)]


def run(function: Any, given: dict[str, Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    """y and the gradients of x, gate_up, down and weights."""
    leaves = [given[name].to(device, dtype).requires_grad_() for name in ("x", "gate_up", "down")]
    leaves.append(given["weights"].to(device).requires_grad_())
    y = function(*leaves, given["indices"].to(device))
    return [y, *torch.autograd.grad(y, leaves, given["dy"].to(device, dtype))]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_the_layer_is_near_the_exact_one(sizes: tuple[int, ...]) -> None:
    given = case(*sizes, idle=sizes[3] > 4)
    found = run(fp8_experts.moe_mlp, given, "cpu", torch.float32)
    want = run(reference.moe_mlp, given, "cpu", torch.float64)
    errors = [relative(one, other) for one, other in zip(found, want, strict=True) if other.norm() > 0]
    assert all(1e-3 < error < 0.15 for error in errors), errors
    if sizes[3] > 4:
        assert not found[2][0].any() and not found[3][0].any(), "an expert without rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_hopper, pytest.mark.gpu])])
def test_main_gradients_are_added_to_or_overwritten(device: str, accumulate: bool, dtype: torch.dtype) -> None:
    given = case(130, 64, 32, 4, 2, idle=True)
    want = run(fp8_experts.moe_mlp, given, device, torch.bfloat16)
    leaves = [given[name].to(device, torch.bfloat16).requires_grad_() for name in ("x", "gate_up", "down")]
    buffers = [torch.full_like(leaf, 3.0, dtype=dtype) for leaf in leaves[1:]]
    calls: list[int] = []
    main_grads = tuple(MainGrad(buffer, lambda: calls.append(1), lambda: accumulate) for buffer in buffers)
    arrived: list[Tensor] = []
    y = fp8_experts.moe_mlp(
        *leaves, given["weights"].to(device), given["indices"].to(device), main_grads,
        lambda dx, dweights: arrived.extend((dx, dweights)),
    )  # fmt: skip
    y.backward(given["dy"].to(device, torch.bfloat16))
    assert len(calls) == 2 and leaves[1].grad is None and leaves[2].grad is None
    assert torch.equal(leaves[0].grad, want[1]) and torch.equal(arrived[0], want[1])
    for buffer, gradient in zip(buffers, want[2:4], strict=True):
        assert relative(buffer.float() - (3.0 if accumulate else 0.0), gradient) < (0.02 if accumulate else 5e-3)


def test_no_rows_and_widths_that_do_not_fit() -> None:
    given = case(1, 16, 16, 2, 1)
    empty = {**given, **{name: given[name][:0] for name in ("x", "weights", "indices", "dy")}}
    y, dx, dgate_up, *_ = run(fp8_experts.moe_mlp, empty, "cpu", torch.float32)
    assert y.shape == dx.shape == (0, 16) and not dgate_up.any()
    with pytest.raises(ValueError, match="widths 16 and 24; both must be multiples of 16"):
        run(fp8_experts.moe_mlp, case(3, 16, 24, 2, 1), "cpu", torch.float32)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_a_gpu_computes_what_the_cpu_does(sizes: tuple[int, ...]) -> None:
    given = case(*sizes, idle=sizes[3] > 4)
    on_cpu = run(fp8_experts.moe_mlp, given, "cpu", torch.bfloat16)
    on_gpu = run(fp8_experts.moe_mlp, given, "cuda", torch.bfloat16)
    again = run(fp8_experts.moe_mlp, given, "cuda", torch.bfloat16)
    for one, other, third in zip(on_gpu, on_cpu, again, strict=True):
        assert torch.equal(one, third)
        assert relative(one, other) < 0.03 or other.norm() == 0  # a quotient half way between may go either way
