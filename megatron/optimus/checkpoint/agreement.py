"""How the ranks of a collective save or load agree whether all of them succeeded.

One small all-reduce each: whatever fails on any rank, every rank learns it at the same point and none waits forever.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megatron.optimus.checkpoint.errors import CheckpointError

_NO_FAILURE = 1 << 62
_ERRNO_LIMIT = 1 << 12


class Ranks:
    """The ranks that act together: a process group (None: all ranks, or this process alone without one).

    ``device``: where the group's backend wants its tensors ("cpu" for gloo, the rank's accelerator for nccl, xccl).
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1

    def broadcast(self, values: list[int]) -> list[int]:
        """Rank 0's integers (below 2^63), on every rank."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor.tolist()

    def first_failure(self, error: Exception | None) -> tuple[int, int] | None:
        """(rank, errno or 0) of the lowest rank that gave an error; None when no rank did. Collective."""
        code = _NO_FAILURE
        if error is not None:
            number = error.errno or 0 if isinstance(error, OSError) else 0
            code = self.rank * _ERRNO_LIMIT + min(number, _ERRNO_LIMIT - 1)
        if self.size > 1:
            tensor = torch.tensor([code], dtype=torch.int64, device=self._device)
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
            code = int(tensor.item())
        return None if code == _NO_FAILURE else divmod(code, _ERRNO_LIMIT)

    def agree(self, error: Exception | None, task: str) -> None:
        """Raises CheckpointError on every rank when any rank gave an error, naming the rank. Collective."""
        failure = self.first_failure(error)
        if error is not None:
            raise CheckpointError(f"{task} failed on rank {self.rank}: {error}") from error
        if failure is not None:
            rank, number = failure
            reason = os.strerror(number) if number else "see the message of that rank"
            raise CheckpointError(f"{task} failed on rank {rank}: {reason}")
