"""Runs a ShardOptimizer on a flat parameter cut into shards, as the sharded optimizer does, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optimizers import Shard, ShardOptimizer, StepScalars


class Shards:
    """``weights`` [n] cut at multiples of ``cut``, each part a shard with a parameter in ``param_dtype``."""

    def __init__(
        self, optimizer: ShardOptimizer, options: dict[str, Any], weights: Tensor, cut: int, param_dtype: torch.dtype
    ) -> None:
        self.optimizer, self.options, self.step = optimizer, options, 0
        self.shards = []
        for part in weights.split(cut):
            shard = Shard(part.clone(), torch.empty(0), part.to(param_dtype, copy=True))
            shard.state = optimizer.new_state(shard, options)
            self.shards.append(shard)
        self.cut = cut

    def update(self, gradient: Tensor, scale: float = 1.0, skip: bool = False) -> None:
        """One step on the whole gradient, given as the sharded optimizer passes it: times 1 / scale."""
        scalars = StepScalars.of(gradient.device, self.step + 1, scale, skip)
        self.step += not skip
        for shard, part in zip(self.shards, gradient.split(self.cut), strict=True):
            shard.grad = part.clone()
            self.optimizer.update_(shard, self.options, scalars)

    def master(self) -> Tensor:
        return torch.cat([shard.master for shard in self.shards])

    def param(self) -> Tensor:
        return torch.cat([shard.param for shard in self.shards])

    def state(self, kind: str) -> Tensor:
        return torch.cat([self.optimizer.read_state(shard, kind) for shard in self.shards])


def gradients(numel: int, steps: int) -> Sequence[Tensor]:
    """fp32 gradients of very different sizes; one element's is always zero."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.exp(2 * torch.randn(numel, generator=generator))
    scales[0] = 0
    return [torch.randn(numel, generator=generator) * scales for _ in range(steps)]
