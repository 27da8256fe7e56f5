"""How ranks that each did something alone agree whether all of them succeeded.

One small all-reduce each: whatever fails on any rank, every rank learns it at the same point and none waits forever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

RELAYED = "optimus_relayed"  # attribute of an error that another rank reports
_NO_FAILURE = 1 << 62
_ERRNO_LIMIT = 1 << 12
T = TypeVar("T")


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The action's result or its error: a rank that fails must still take part in the agreement that follows."""
    try:
        return action(), None
    except Exception as error:
        return None, error


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

    def sum(self, values: list[int]) -> list[int]:
        """Sums over the ranks, place by place, of as many integers on each (below 2^63 in all). Collective."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, group=self._group)
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

    def together(self, action: Callable[[], T], task: str, error_type: type[Exception]) -> T:
        """Runs ``action`` on every rank; its result, if it succeeded everywhere. Collective.

        Raises ``error_type`` on every rank when it raised anything on any rank, naming the rank. ``action`` must not
        communicate: the others could not know that one has left.
        """
        result, error = attempt(action)
        failure = self.first_failure(error)
        if failure is None:
            return result  # type: ignore[return-value]  # no error, so this is the action's own result
        first, number = failure
        if error is not None:
            rank, reason = self.rank, str(error)
        else:
            rank, reason = first, os.strerror(number) if number else "see the message of that rank"
        raised = error_type(f"{task} failed on rank {rank}: {reason}")
        setattr(raised, RELAYED, self.rank != first)  # the first rank that failed speaks for all
        raise raised from error
