"""Experts: shapes that are refused, and when the backward adds to the optimizer's buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.optimus import ops
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.moe.experts import Experts


@pytest.fixture
def _reference() -> Iterator[None]:
    before = ops.get_backend()
    ops.set_backend("reference")
    yield
    ops.set_backend(before)


def _backward(dtype: torch.dtype, has_place: bool) -> tuple[int, list[torch.Tensor], list[int]]:
    """Operations, gradients, and which weights' gradients were added to their place."""
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12}
    config = ModelConfig(**sizes, num_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2)
    experts, added = Experts(config).to(dtype), []
    for index, weight in enumerate(experts.parameters()):
        torch.nn.init.normal_(weight)
        if has_place:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
            weight.main_grad_ready = lambda index=index: added.append(index)  # type: ignore[attr-defined]
    x, weights = torch.randn(10, 8).to(dtype).requires_grad_(), torch.rand(10, 2)
    y = experts(x, weights, torch.randint(0, 4, (10, 2)))
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    gradients = [w.main_grad if i in added else w.grad for i, w in enumerate(experts.parameters())]
    assert x.grad is not None
    return counter.get_total_flops(), [x.grad, *gradients], added


@pytest.mark.usefixtures("_reference")
def test_the_reference_computes_nothing_again_in_fp32() -> None:
    plain, expected, _ = _backward(torch.float32, has_place=False)
    found, gradients, added = _backward(torch.float32, has_place=True)
    assert found == plain and not added
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    _, gradients, added = _backward(torch.bfloat16, has_place=True)
    assert sorted(added) == [0, 1] and gradients[1].dtype == torch.float32, "sums of 16-bit gradients stay in fp32"


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, gate_up, down = torch.randn(4, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    weights, indices = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    for bad in (
        (x[:, :5], gate_up, down, weights, indices),
        (x, gate_up[:, :6], down, weights, indices),
        (x, gate_up, down, weights[:3], indices),
        (x.double(), gate_up, down, weights, indices),
        (x, gate_up, down, weights.double(), indices),
        (x, gate_up, down, weights, indices.float()),
    ):
        with pytest.raises(ValueError, match="moe_mlp"):
            ops.moe_mlp(*bad)
