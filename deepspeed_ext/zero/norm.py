"""The global gradient norm: every element once, one collective, nothing on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Partial norms are taken over this many elements in fp32 and summed in fp64: one fp32 accumulator over a shard of
# billions would stop growing once it exceeds 2^24 times the addend.
_CHUNK = 4096


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor (fp32 or bf16) as a 0-dim fp64 tensor; inf or NaN if the tensor holds one."""
    wide = _wide_dtype(tensor.device)
    whole = tensor.numel() // _CHUNK * _CHUNK
    norms = torch.linalg.vector_norm(tensor[:whole].view(-1, _CHUNK), dim=1, dtype=torch.float32).to(wide)
    rest = torch.linalg.vector_norm(tensor[whole:], dtype=torch.float32).to(wide)
    return norms.square().sum() + rest.square()


def total_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all tensors, fp64 of shape [1]."""
    wide = _wide_dtype(device)
    if not tensors:
        return torch.zeros(1, dtype=wide, device=device)
    if device.type == "cpu":
        return torch.stack([sum_of_squares(tensor) for tensor in tensors]).sum().reshape(1)
    # One multi-tensor kernel for any number of shards; it accumulates chunks of 65,536 elements by 512 threads.
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch.stack(norms).to(wide).square().sum().reshape(1)


def global_norm(shards: Sequence[Tensor], device: torch.device, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """L2 norm over the shards of all ranks that ``groups`` span, a 0-dim fp64 tensor with the same bits on every rank.

    Each rank passes the shards it counts: dense shards are disjoint over the data-parallel group, expert shards are
    disjoint over the ranks that hold the same experts and hold different experts elsewhere, parameters that are the
    same on all tensor-parallel ranks are passed by one of these; so a plain sum counts every element once. The sums go
    over one group after the other. Collective over each.
    """
    total = total_of_squares(shards, device)
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
    return total[0].sqrt()
