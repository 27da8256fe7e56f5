"""Collectives with a backward for autograd, asynchronous ones without, and their results under recomputation.

All work on dim 0 ("rows"). ``rows_per_rank`` gives the rows of each rank of the group when they differ; None means
that all ranks have the same number, which costs neither padding nor an exchange of counts.
A group of None is a group of one: the collective is then the identity.

Recomputation of activations must not communicate again: that would double the traffic, and ranks would have to
recompute in the same order. ``recording_contexts`` returns the two contexts for a forward pass and its recomputation:
in the first every collective keeps its result, in the second it returns the result kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.platform.process_groups import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup | None


_current = threading.local()  # backward passes, and so recomputations, may run in their own threads


def recording_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns a context in which ``compute_once`` keeps results, and one in which it returns them in the same order."""
    results: list[Any] = []
    return _Recording(results, is_replay=False), _Recording(results, is_replay=True)


class _Recording(AbstractContextManager[None]):
    """Keeps results in a list, or reads them from it. It can be entered again, as a backward that is split in two
    (zero-bubble pipelines) recomputes twice."""

    def __init__(self, results: list[Any], *, is_replay: bool) -> None:
        self._results, self._is_replay = results, is_replay

    def __enter__(self) -> None:
        self._outer = getattr(_current, "record", None)
        _current.record = (iter(list(self._results)) if self._is_replay else None, self._results)

    def __exit__(self, *error: object) -> None:
        _current.record = self._outer


def compute_once(compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Returns ``compute(*args)``, or under recomputation the result that the forward pass kept."""
    record = getattr(_current, "record", None)
    if record is None:
        return compute(*args)
    replay, results = record
    if replay is not None:
        return next(replay).detach()
    result = compute(*args)
    results.append(result.detach())  # detached, as autograd attaches its graph to the tensor that is returned
    return result


def is_recording() -> bool:
    """Whether results are kept for a recomputation, or read in it."""
    return getattr(_current, "record", None) is not None


def is_replaying() -> bool:
    """Whether this is the recomputation."""
    record = getattr(_current, "record", None)
    return record is not None and record[0] is not None


def exchange_row_counts(num_rows: int, group: Group, device: torch.device) -> list[int]:
    """Returns the number of rows of every rank of the group, in rank order. Waits for the device once."""
    if group is None:
        return [num_rows]
    mine = torch.tensor([num_rows], dtype=torch.int64, device=device)
    counts = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather_single(counts, mine, group=group)
    return counts.tolist()


def all_gather_rows(x: Tensor, group: Group, rows_per_rank: list[int] | None = None) -> Tensor:
    """All-gathers rows: [T_r, ...] on rank r -> [sum T_r, ...] on every rank. Backward: reduce-scatter."""
    return x if group is None else _AllGather.apply(x, group, rows_per_rank)


def reduce_scatter_rows(x: Tensor, group: Group, rows_per_rank: list[int] | None = None) -> Tensor:
    """Reduce-scatters rows: [sum T_r, ...] on every rank -> the sum of its rows [T_r, ...]. Backward: all-gather."""
    return x if group is None else _ReduceScatter.apply(x, group, rows_per_rank)


def all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Sends ``send[r]`` rows to rank r and receives ``receive[r]`` from it, in rank order. Backward: the reverse."""
    return x if group is None else _AllToAll.apply(x, send, receive, group)


def start_all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> PendingRows:
    """Starts ``all_to_all_rows``; it overlaps with the work queued before ``wait``, and the backward's all-to-all with
    the backward of that work."""
    pending = _PendingAllToAll(send, receive, group)
    return PendingRows(_StartAllToAll.apply(x, pending), pending)


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Identity; backward: all-reduce. For an input that every rank has and uses for its part of the work."""
    return x if group is None else _AllReduce.apply(x, group, False, True)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """All-reduce; backward: identity. For a sum that all ranks then use in the same way."""
    return x if group is None else _AllReduce.apply(x, group, True, False)


def sum_over_ranks_both_ways(x: Tensor, group: Group) -> Tensor:
    """All-reduce; backward: all-reduce. For a sum that each rank uses for its part of the work."""
    return x if group is None else _AllReduce.apply(x, group, True, True)


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """All-gathers columns: [T, V_r] on rank r -> [T, sum V_r], with equal V_r. Backward: this rank's columns."""
    return x if group is None else _GatherColumns.apply(x, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None) -> Tensor:
        ctx.group, ctx.rows_per_rank = group, rows_per_rank
        return compute_once(_all_gather, x, group, rows_per_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], ctx.group, ctx.rows_per_rank), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None) -> Tensor:
        ctx.group, ctx.rows_per_rank = group, rows_per_rank
        return compute_once(_reduce_scatter, x, group, rows_per_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grads[0], ctx.group, ctx.rows_per_rank), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return compute_once(_all_to_all, x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


class _PendingAllToAll:
    """State shared by the start and the end of an all-to-all, in the forward and in the backward."""

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.send, self.receive, self.group = send, receive, group
        self.started: AsyncCollective | None = None

    def start(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Starts to exchange x; the tensor returned is valid after ``end``."""
        self.started = start_all_to_all(x, send, receive, self.group)
        return self.started.result

    def end(self) -> Tensor:
        assert self.started is not None
        out, self.started = self.started.wait(), None
        return out


class PendingRows:
    """An all-to-all that was started; ``wait`` returns its rows and is to be called once."""

    def __init__(self, sent: Tensor, pending: _PendingAllToAll) -> None:
        self._sent, self._pending = sent, pending

    def wait(self) -> Tensor:
        """Returns the rows received, [R, D], as part of autograd."""
        return _EndAllToAll.apply(self._sent, self._pending)


class _StartAllToAll(torch.autograd.Function):
    """Starts the exchange. Its output only links the graph's two nodes: autograd must not see rows too early."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: _PendingAllToAll) -> Tensor:
        ctx.pending = pending
        pending.start(x.detach(), pending.send, pending.receive)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.pending.end(), None


class _EndAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, pending: _PendingAllToAll) -> Tensor:
        ctx.pending = pending
        return pending.end()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.pending.start(grads[0], ctx.pending.receive, ctx.pending.send), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_forward: bool, in_backward: bool) -> Tensor:
        ctx.group, ctx.in_backward = group, in_backward
        return compute_once(_all_reduce, x, group) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_reduce(grads[0], ctx.group) if ctx.in_backward else grads[0], None, None, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[1]
        return compute_once(_all_gather, x.t(), group, None).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(1, dist.get_rank(ctx.group) * ctx.width, ctx.width), None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class AsyncCollective:
    """A collective that was started; work that does not need its result can be queued before ``wait``."""

    def __init__(
        self,
        works: dist.Work | list[dist.Work],
        result: Tensor,
        source: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._works = works if isinstance(works, list) else [works]
        self.result = result  # valid after ``wait``
        self._source = source  # must live until the collective has read it
        self._finish = finish  # applied to the result, such as removing padding

    def wait(self) -> Tensor:
        """Waits and returns the result."""
        for work in self._works:
            work.wait()
        return self.result if self._finish is None else self._finish(self.result)


def start_all_gather(x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None = None) -> AsyncCollective:
    """Starts an all-gather, [T_r, ...] on rank r -> [sum T_r, ...]; outside autograd."""
    x = _padded(_to_send(x), rows_per_rank)
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    work = all_gather_single(out, x, group=group, async_op=True)
    return AsyncCollective(
        work, out, x, None if rows_per_rank is None else lambda out: _without_padding(out, rows_per_rank)
    )


def start_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None = None
) -> AsyncCollective:
    """Starts a reduce-scatter, [sum T_r, ...] on each rank -> this rank's T_r rows of the sum; outside autograd."""
    x = _with_padding(_to_send(x), rows_per_rank)
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    work = reduce_scatter_single(out, x, group=group, async_op=True)
    rows = None if rows_per_rank is None else rows_per_rank[dist.get_rank(group)]
    return AsyncCollective(work, out, x, None if rows is None else lambda out: out[:rows])


def start_all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> AsyncCollective:
    """Starts ``all_to_all_rows``; outside autograd."""
    x, out = _to_send(x), x.new_empty(sum(receive), *x.shape[1:])
    return AsyncCollective(dist.all_to_all_single(out, x, receive, send, group=group, async_op=True), out, x)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> AsyncCollective:
    """Starts an all-reduce in place; outside autograd."""
    return AsyncCollective(dist.all_reduce(x, group=group, async_op=True), x, x)


def start_ring_shift(x: Tensor, out: Tensor, step: int, group: dist.ProcessGroup) -> AsyncCollective:
    """Starts to send x to rank + step and to receive ``out`` from rank - step, modulo the group's size.

    Both tensors are contiguous. Point-to-point, outside autograd. All ranks call it with the same step.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + step) % size)
    previous = dist.get_global_rank(group, (rank - step) % size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _to_send(x), following, group), dist.P2POp(dist.irecv, out, previous, group)]
    )
    return AsyncCollective(works, out, x)


def all_gather_blocks(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields (rank, its x) for every rank of the group: this rank's first, the others as they arrive.

    Args:
        x: this rank's block, contiguous [T, ...].
        out: [size * T, ...], filled with the blocks of all ranks except this rank's own.
        group: the ranks. Outside autograd.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    blocks = out.chunk(size)
    arriving = [start_ring_shift(x, blocks[(rank - step) % size], step, group) for step in range(1, size)]
    yield rank, x
    for step, started in enumerate(arriving, start=1):
        yield (rank - step) % size, started.wait()


def all_gather_without_grad(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers rows of equal number on every rank; outside autograd."""
    return start_all_gather(x, group).wait()


def _all_gather(x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None) -> Tensor:
    x = _padded(_to_send(x), rows_per_rank)
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    all_gather_single(out, x, group=group)
    return out if rows_per_rank is None else _without_padding(out, rows_per_rank)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = _with_padding(_to_send(x), rows_per_rank)
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out if rows_per_rank is None else out[: rows_per_rank[rank]]


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, _to_send(x), receive, send, group=group)
    return out


def _to_send(x: Tensor) -> Tensor:
    """Contiguous and detached: communication threads release the tensor, and its graph, some time after ``wait``."""
    return x.detach().contiguous()


def _padded(x: Tensor, rows_per_rank: list[int] | None) -> Tensor:
    """Pads with zero rows to the largest rank's count, as backends gather equal blocks only."""
    if rows_per_rank is None or x.shape[0] == max(rows_per_rank):
        return x
    return torch.cat([x, x.new_zeros(max(rows_per_rank) - x.shape[0], *x.shape[1:])])


def _with_padding(x: Tensor, rows_per_rank: list[int] | None) -> Tensor:
    """Pads the rows of each rank."""
    if rows_per_rank is None:
        return x
    return torch.cat([_padded(block, rows_per_rank) for block in x.split(rows_per_rank)])


def _without_padding(x: Tensor, rows_per_rank: list[int]) -> Tensor:
    blocks = x.view(len(rows_per_rank), -1, *x.shape[1:])
    return torch.cat([block[:rows] for block, rows in zip(blocks, rows_per_rank, strict=True)])
