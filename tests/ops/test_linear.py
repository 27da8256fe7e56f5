"""Products of one input with several weights: values and gradients against fp64."""

from __future__ import annotations

import pytest
import torch

from megatron.optimus import ops
from tests.ops.test_elementwise import close, each, made


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("used", ["all", "last", "input frozen", "weight frozen"])
def test_values(backend: str, device: str, dtype: torch.dtype, used: str) -> None:
    ops.set_backend(backend)
    x = made(2, 5, 12, dtype=dtype, device=device)
    weights = [made(width, 12, dtype=dtype, device=device, seed=width) for width in (8, 8, 3)]
    leaves = [x, *weights]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index != {"input frozen": 0, "weight frozen": 2}.get(used))
    picks = [2] if used == "last" else [0, 1, 2]
    grads = [made(2, 5, weights[i].shape[0], dtype=dtype, device=device, seed=9 + i) for i in picks]
    outputs = ops.linears(x, weights)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    got = torch.autograd.grad([outputs[i] for i in picks], wanted, grads, allow_unused=True)
    exact = [leaf.detach().double().cpu().requires_grad_(leaf.requires_grad) for leaf in leaves]
    wants = [exact[0] @ weight.T for weight in exact[1:]]
    for output, want in zip(outputs, wants, strict=True):
        close(output, want, dtype)
    exact_leaves = [leaf for leaf in exact if leaf.requires_grad]
    want_grads = torch.autograd.grad(
        [wants[i] for i in picks], exact_leaves, [grad.double().cpu() for grad in grads], allow_unused=True
    )
    for one, want in zip(got, want_grads, strict=True):
        assert (one is None) == (want is None)
        if one is not None:
            close(one, want, dtype)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_gradients_are_written_and_added_to(backend: str, device: str, dtype: torch.dtype) -> None:
    """Two micro-batches; ``torch.autograd.grad`` and a weight without a buffer get ordinary gradients."""
    ops.set_backend(backend)
    x = made(7, 12, dtype=dtype, device=device).requires_grad_()
    weights = [torch.nn.Parameter(made(width, 12, dtype=dtype, device=device, seed=width)) for width in (8, 16)]
    grads = [made(7, width, dtype=dtype, device=device, seed=9 + width) for width in (8, 16)]
    buffer, calls = torch.full((16, 12), torch.nan, device=device), []
    other, kept = weights
    kept.main_grad, kept.main_grad_ready = buffer, lambda: calls.append(1)  # type: ignore[attr-defined]
    kept.main_grad_holds_sum = lambda: bool(calls)  # type: ignore[attr-defined]
    [alone] = torch.autograd.grad(ops.linears(x, weights)[1], [kept], grads[1])
    assert not calls and buffer.isnan().all()
    for _ in range(2):
        torch.autograd.backward(ops.linears(x, weights), grads)
    want_other, want = (grad.double().cpu().T @ x.detach().double().cpu() for grad in grads)
    close(alone, want, dtype)
    takes = backend == "triton" and (dtype == torch.float32 or torch.device(device).type == "cuda")
    assert len(calls) == (2 if takes else 0) and (kept.grad is None) == takes
    total = buffer if takes else kept.grad
    assert total is not None and other.grad is not None
    # Products of 16-bit numbers are exact in fp32; ordinary gradients are rounded.
    close(total, 2 * want, torch.float32 if takes else dtype)
    close(other.grad, 2 * want_other, dtype)
