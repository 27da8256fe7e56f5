"""A stand-in for NVIDIA's apex with its signatures and its order of arithmetic, for machines without CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CALLS: list[str] = []


class FusedRMSNorm(nn.Module):
    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__()
        assert elementwise_affine and not memory_efficient
        self.normalized_shape, self.eps = torch.Size((normalized_shape,)), eps
        self.weight = nn.Parameter(torch.empty(normalized_shape))

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append("rms")
        x = input.float()
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * inverse * self.weight.float()).to(input.dtype)


class FusedLayerNorm(nn.Module):
    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__()
        assert not elementwise_affine and not memory_efficient
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append("layer")
        x = input.float()
        x = x - x.mean(-1, keepdim=True)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(input.dtype)


class FusedAdam(torch.optim.Optimizer):
    """One count of steps for a group, states in fp32, and weight decay inside of the update, as apex has them."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert adam_w_mode and not (amsgrad or capturable or master_weights)
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode, self.set_grad_none = 1, set_grad_none

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        CALLS.append("adam")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), number = group["betas"], group["step"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                m, v, grad = state["exp_avg"], state["exp_avg_sq"], param.grad
                m.copy_(beta1 * m + (1 - beta1) * grad)
                v.copy_(beta2 * v + (1 - beta2) * grad * grad)
                root = (v / (1 - beta2**number)).sqrt() + group["eps"]
                update = m / (1 - beta1**number) / root + group["weight_decay"] * param.data
                param.data.copy_(param.data - group["lr"] * update)


FusedAdam.__module__ = "apex.optimizers.fused_adam"


@contextmanager
def installed() -> Iterator[list[str]]:
    """Has ``import apex`` find the stand-in; yields the calls of its kernels from here on."""
    names = ("apex", "apex.normalization", "apex.optimizers")
    assert "apex" not in sys.modules, "the real one is there"
    modules = [ModuleType(name) for name in names]
    _, normalization, optimizers = modules
    normalization.FusedRMSNorm, normalization.FusedLayerNorm = FusedRMSNorm, FusedLayerNorm  # type: ignore[attr-defined]
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules.update(zip(names, modules, strict=True))
    CALLS.clear()
    try:
        yield CALLS
    finally:
        for name in names:
            del sys.modules[name]
