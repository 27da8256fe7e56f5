"""Runs work on all ranks of a process group, and turns an error on one rank into an error on every rank.

Each rank does its part without communicating; one small all-reduce then tells all ranks whether any of them failed. So
every rank raises at the same point, and no rank waits in a later collective for one that has left.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.optimus.platform import memory
from megatron.optimus.platform.process_groups import all_gather_single

# Attribute of an error: True on every rank but the first that failed, whose message is the one to print.
REPORTED_BY_ANOTHER_RANK = "optimus_reported_by_another_rank"
FAILED_ERRNO = "optimus_errno"  # attribute of an error: the errno of the first rank that failed, 0 for another error
NO_FAILURE = 1 << 62
_ERRNO_LIMIT = 1 << 12
T = TypeVar("T")


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns (result, None) or (None, error): a rank that fails must still join the collective that follows."""
    try:
        return action(), None
    except Exception as error:
        return None, error


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    """The stream of these collectives. One for all, as torch reuses a small pool of streams: a new one each time would
    sometimes be one that copies run on."""
    return torch.Stream(device)


class Ranks:
    """The ranks of a process group, with small host-side collectives over them.

    Args:
        group: the process group; None is all ranks, or this process where torch.distributed is not initialised.
        device: where the group's backend takes tensors: "cpu" for gloo, the rank's accelerator for nccl and xccl.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1

    @classmethod
    def alone(cls) -> Ranks:
        """Returns a group of this process only, whatever process groups exist."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.device, ranks.rank, ranks.size = None, "cpu", 0, 1
        return ranks

    def broadcast(self, values: list[int]) -> list[int]:
        """Returns rank 0's integers (below 2^63) on every rank. Collective."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor.tolist()

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Returns rank 0's bytes on every rank. Collective."""
        [size] = self.broadcast([len(data)])
        if self.size == 1 or size == 0:
            return data
        tensor = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor = tensor.to(self.device)
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor.cpu().numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all ranks in rank order. Collective; messages are padded to the longest."""
        if self.size == 1:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        all_gather_single(sizes, torch.tensor([len(data)], device=self.device), group=self.group)
        lengths = sizes.tolist()
        own = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]
        everyone = torch.empty(self.size * len(own), dtype=torch.uint8, device=self.device)
        all_gather_single(everyone, own.to(self.device), group=self.group)
        rows = everyone.cpu().view(self.size, -1).numpy()
        return [rows[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def start_all_reduce_min(self, value: int) -> Callable[[], int]:
        """Starts an all-reduce of the minimum; the function returned waits for it and returns it. Collective."""
        if self.size == 1:
            return lambda: value
        # On its own stream: reading the result must not wait for the computation that was queued meanwhile.
        is_cpu = torch.device(self.device).type == "cpu"
        stream = contextlib.nullcontext() if is_cpu else _side_stream(torch.device(self.device))
        with stream:
            tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group, async_op=True)

        def result() -> int:
            with stream:
                work.wait()
                return int(tensor.item())

        return result

    def encode_failure(self, error: Exception | None) -> int:
        """Returns rank and errno as one number, so that a minimum over ranks finds the lowest rank that failed.

        NO_FAILURE where ``error`` is None.
        """
        if error is None:
            return NO_FAILURE
        number = error.errno or 0 if isinstance(error, OSError) else 0
        return self.rank * _ERRNO_LIMIT + min(number, _ERRNO_LIMIT - 1)

    def decode_failure(self, code: int) -> tuple[int, int] | None:
        """Returns the (rank, errno or 0) of an ``encode_failure`` number; None for NO_FAILURE and above."""
        return None if code >= NO_FAILURE else divmod(code, _ERRNO_LIMIT)

    def first_failure(self, error: Exception | None) -> tuple[int, int] | None:
        """Returns (rank, errno or 0) of the lowest rank that has an error; None where no rank has. Collective."""
        return self.decode_failure(self.start_all_reduce_min(self.encode_failure(error))())

    def run_on_all_ranks(self, action: Callable[[], T], task: str, error_type: type[Exception]) -> T:
        """Runs ``action`` on every rank and raises on all of them if it failed on any. Collective.

        Args:
            action: this rank's part; must not communicate, as other ranks could not know that one has left.
            task: what is done, for the message: "<task> failed on rank <r>: <reason>".
            error_type: class of the error to raise.

        Returns:
            This rank's result.

        Raises:
            error_type: on every rank, where ``action`` raised on any rank.
        """
        result, error = attempt(action)
        failure = self.first_failure(error)
        if failure is None:
            return result  # type: ignore[return-value]  # no error, so this is the action's own result
        raise self.failure_error(failure, error, task, error_type) from error

    @contextlib.contextmanager
    def failing_alike(self) -> Iterator[None]:
        """Wraps work that fails on all ranks alike, from what all of them know: the error is rank 0's to print."""
        try:
            yield
        except Exception as error:
            if not hasattr(error, REPORTED_BY_ANOTHER_RANK):
                setattr(error, REPORTED_BY_ANOTHER_RANK, self.rank > 0)
            raise

    def failure_error(
        self, failure: tuple[int, int], error: Exception | None, task: str, error_type: type[Exception]
    ) -> Exception:
        """Returns the error to raise for what ``first_failure`` returned, with this rank's reason if it has one."""
        first, number = failure
        if error is not None:
            rank, reason = self.rank, memory.reason(error)
        else:
            rank, reason = first, os.strerror(number) if number else "see the message of that rank"
        raised = error_type(f"{task} failed on rank {rank}: {reason}")
        setattr(raised, REPORTED_BY_ANOTHER_RANK, self.rank != first)
        setattr(raised, FAILED_ERRNO, number)
        return raised
