"""The global gradient norm: every element once, one collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

# Partial norms are taken over this many elements in fp32 and summed in fp64: one fp32 accumulator over a shard of
# billions would stop growing once it exceeds 2^24 times the addend.
_CHUNK = 4096


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a 1-D fp32 tensor as a 0-dim fp64 tensor; inf or NaN if the tensor holds one."""
    wide = _wide_dtype(tensor.device)
    whole = tensor.numel() // _CHUNK * _CHUNK
    norms = torch.linalg.vector_norm(tensor[:whole].view(-1, _CHUNK), dim=1).to(wide)
    rest = torch.linalg.vector_norm(tensor[whole:]).to(wide)
    return norms.square().sum() + rest.square()


def global_norm(shards: Iterable[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """L2 norm over the shards of all ranks of ``group``, a 0-dim fp64 tensor with the same bits on every rank.

    Each rank passes the shards it owns: dense shards are disjoint over the group, expert shards are disjoint over the
    ranks that hold the same experts and hold different experts elsewhere, so a plain sum counts every element once,
    for any number of expert groups. Collective over ``group``.
    """
    total = torch.stack([sum_of_squares(shard) for shard in shards]).sum().reshape(1)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total[0].sqrt()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of length ``norm`` to ``max_norm``; 1 if it is shorter or max_norm is 0 (off)."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
