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
