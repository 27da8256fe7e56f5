"""Expert gradients added by the backward to the optimizer's buffers: weights and memory, on two gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed_ext
from megatron.optimus.moe.experts import Experts
from megatron.optimus.ops import main_grad_of
from tests.distributed.layouts import deviation, model_config
from tests.helpers import run_distributed
from tests.ops.test_main_grads import peak_bytes

TOKENS, EXPERTS, TOPK = 24, 4, 2


class Stack(nn.Module):
    """Three layers of experts with given routing; ``shares``: the last is the first again."""

    def __init__(self, width: int, inner: int, dtype: torch.dtype, shares: bool = False) -> None:
        super().__init__()
        config = model_config(dict(num_experts=EXPERTS, hidden_size=width, moe_ffn_hidden_size=inner))
        self.layers = nn.ModuleList(Experts(config) for _ in range(2 if shares else 3))
        if shares:
            self.layers.append(self.layers[0])
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        generator = torch.Generator().manual_seed(4)
        for weight in self.layers.parameters():
            weight.data = (torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(9)
        for layer in self.layers:
            indices = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
            x = x + layer(x, torch.rand(TOKENS, TOPK, generator=generator), indices)
        return (x * self.scale).float().square().mean()


def _sharded(model: nn.Module, bucket_numel: int = 4096) -> Any:
    assert dist.group.WORLD is not None
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    groups = [{"params": [p for p in names if p.dim() > 1]}, {"params": [p for p in names if p.dim() == 1]}]
    return deepspeed_ext.EPZeroOptimizer(
        torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),  # experts in buckets of their own, as in a model of ours
        names,
        groups=deepspeed_ext.ZeroGroups(dense=dist.group.WORLD, expert={}),
        options=deepspeed_ext.ZeroOptions(bucket_numel=bucket_numel),
        module=model,
    )


def _train(model: Stack, rank: int, fuses: bool) -> list[torch.Tensor]:
    """Weights after three steps of two micro-batches."""
    optimizer = _sharded(model)
    experts = [weight for weight in model.layers.parameters() if weight.requires_grad]
    if not fuses:
        for weight in experts:
            weight.main_grad = None  # type: ignore[attr-defined]
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            optimizer.set_gradient_accumulation_boundary(micro == 1)
            model(torch.randn(TOKENS, model.scale.numel(), generator=generator)).backward()
            assert not fuses or all(weight.grad is None for weight in experts)
            if micro == 1:  # in the first step nobody knows yet what comes this way
                assert step == 0 or all(bucket.is_reduced for bucket in optimizer._sync.buckets)
                optimizer.reduce_gradients()
            optimizer.backward_epilogue()
        optimizer.step()
        assert all((main_grad_of(weight) is not None) is fuses for weight in experts)
    return [p.detach().clone() for p in model.parameters()]


def _same_weights(rank: int, world: int) -> dict[str, float]:
    found = {}
    for case in ("plain", "frozen", "shared"):
        runs = []
        for fuses in (True, False):
            model = Stack(16, 12, torch.float32, shares=case == "shared")
            if case == "frozen":
                model.layers[1].gate_up_weight.requires_grad_(False)  # type: ignore[union-attr]
            start = [p.detach().clone() for p in model.parameters()]
            runs.append(_train(model, rank, fuses))
        moved = [not torch.equal(a, b) for a, b in zip(start, runs[0], strict=True)]
        assert moved.count(False) == (case == "frozen")
        found[case] = max(deviation(a, b) for a, b in zip(*runs, strict=True))
    return found


def _peaks(rank: int, world: int) -> tuple[int, int, int]:
    """Bytes at the peak of a forward and backward in bf16, with and without; bytes of the experts' bf16 gradients.

    All are in one bucket, which takes gradients over when it has them all.
    """
    peaks = []
    for fuses in (True, False):
        model = Stack(128, 96, torch.bfloat16)
        optimizer = _sharded(model, bucket_numel=10**7)
        if not fuses:
            for weight in model.layers.parameters():
                weight.main_grad = None  # type: ignore[attr-defined]
        x = torch.randn(TOKENS, 128).bfloat16()
        optimizer.set_gradient_accumulation_boundary(False)

        def backward(model: Stack = model, x: torch.Tensor = x) -> None:
            model(x).backward()

        backward()  # the first one finds out who adds where
        optimizer.backward_epilogue()
        peaks.append(peak_bytes(backward))
        optimizer.backward_epilogue()
    weights = list(model.layers.parameters())
    return peaks[0], peaks[1], sum(weight.numel() * 2 for weight in weights)


def test_weights_equal_those_without() -> None:
    for found in run_distributed(_same_weights, 2):
        assert set(found) == {"plain", "frozen", "shared"}
        assert max(found.values()) < 2e-6, found


def test_no_gradient_of_the_experts_in_bf16_at_the_peak() -> None:
    for fused, plain, gradients in run_distributed(_peaks, 2):
        assert gradients > 800_000
        assert plain - fused >= 0.98 * gradients, (fused, plain, gradients)
