"""Checksums of what the optimizer keeps, which find bits that flipped in memory: silent data corruption.

A tensor's checksum is two sums of its bytes, taken as 64-bit integers: a plain one, and one in which each row of
``ROW`` integers is weighted by its number. Integer sums do not depend on the order, so they are exact on every device.
One flipped bit always changes the first sum. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.groups import ranks_of
from deepspeed_ext.zero.bucket import all_gather

if TYPE_CHECKING:
    from deepspeed_ext.zero.flat_buffer import FlatBuffer
    from deepspeed_ext.zero.optimizer import EPZeroOptimizer

ROW = 512  # integers of 8 bytes


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Sums the bits of a tensor of any dtype and shape: int64 [2] on its device, modulo 2^64."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8 or raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))  # a copy, which begins at 0
    words = raw.view(torch.int64)
    whole = words.numel() // ROW * ROW
    rows = words[:whole].view(-1, ROW).sum(dim=1)
    if whole < words.numel():
        rows = torch.cat((rows, words[whole:].sum().view(1)))
    numbers = torch.arange(1, rows.numel() + 1, device=rows.device)
    return torch.stack((rows.sum(), (rows * numbers).sum()))


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the checksums of several tensors: int64 [N, 2]."""
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64, device=device)
    return torch.stack([checksum(tensor) for tensor in tensors])


class Replicas(NamedTuple):
    """Checksums of flat buffers that should be the same on all ranks of a group."""

    ranks: list[int]  # of the group, global
    names: list[str]  # of the flat buffers
    sums: Tensor  # int64 [ranks, flat buffers, 2], gathered


class StateChecksums:
    """Checksums of an optimizer's sharded states after an update, to be compared before the next one.

    The states are fp32 masters (of fp32 parameters this rank's part of the parameters) and all that the update rule
    keeps. Whatever else changes them in between must call ``forget``.

    Args:
        optimizer: whose states they are.
    """

    def __init__(self, optimizer: EPZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._recorded: Tensor | None = None

    def record(self) -> None:
        """Takes the checksums. Local."""
        self._recorded = checksums([tensor for _, tensor in self._states()], self._optimizer.device)

    def forget(self) -> None:
        """Drops the checksums: the states will change by other means than an update."""
        self._recorded = None

    def changed(self) -> Tensor | None:
        """Compares the states with the checksums taken last.

        Returns:
            bool [N] on the device, True for each of ``names`` that has changed; None where there is nothing to compare.
        """
        if self._recorded is None:
            return None
        now = checksums([tensor for _, tensor in self._states()], self._optimizer.device)
        return (now != self._recorded).any(dim=1)

    def names(self) -> list[str]:
        """Returns what each number of ``changed`` is about, for messages."""
        return [name for name, _ in self._states()]

    def _states(self) -> list[tuple[str, Tensor]]:
        self._optimizer.wait_for_params()
        found = []
        for flat in self._optimizer.flat_buffers:
            first = next(iter(flat.params))
            for bucket in flat.buckets:
                own = {"master weights": bucket.shard.master, **bucket.shard.state}
                found += [(f"{kind} (parameters from {first} on)", tensor) for kind, tensor in own.items()]
            for states in [] if flat.exchange is None else flat.exchange.state_tensors():
                found += [(f"{kind} (matrices from {first} on)", tensor) for kind, tensor in states.items()]
            found += [(f"{kind} (tensors from {first} on)", tensor) for kind, tensor in flat.tensor_state.items()]
        return found

    def replicas(self) -> list[Replicas]:
        """Gathers the checksums of the parameters over the ranks that hold the same. Collective.

        Parameters are the same on all ranks of their data-parallel group, and those that tensor parallelism has not cut
        on its ranks too.
        """
        optimizer = self._optimizer
        optimizer.wait_for_params()
        by_group: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[FlatBuffer]]] = {}
        for flat in optimizer.flat_buffers:
            tensor = optimizer.groups.tensor if flat.key.is_tensor_replica else None
            for group in (flat.group, tensor):
                if group is not None and len(ranks_of(group)) > 1:
                    by_group.setdefault(tuple(ranks_of(group)), (group, []))[1].append(flat)
        sums = {id(flat): checksum(flat.param_buffer) for flat in optimizer.flat_buffers} if by_group else {}
        found = []
        for ranks, (group, buffers) in by_group.items():
            own = torch.stack([sums[id(flat)] for flat in buffers])
            everyone = own.new_empty(len(ranks), *own.shape)
            all_gather(everyone.view(-1), own.view(-1), group=group)
            found.append(Replicas(list(ranks), [next(iter(flat.params)) for flat in buffers], everyone))
        return found
