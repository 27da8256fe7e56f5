"""Collectives that autograd understands: each forward beside its transpose, which is its backward.

All work on dim 0 ("rows"). ``rows_per_rank`` gives the rows of each rank of the group when they differ; None means
that all ranks have the same number, which costs neither padding nor an exchange of counts.
A group of None is a group of one: the collective is then the identity.

Recomputation of activations must not communicate again: it would pay twice, and ranks would have to recompute in the
same order. ``recording_contexts`` gives the two contexts for a computation and its repetition; inside them every
collective of the forward keeps its result, and the repetition takes it from there.
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


_current = threading.local()  # backward passes, and so repetitions, may run in threads of their own


def recording_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts in which ``compute_once`` keeps results, and in which it gives them back in the same order."""
    results: list[Any] = []
    return _Recording(results, is_replay=False), _Recording(results, is_replay=True)


class _Recording(AbstractContextManager[None]):
    """Keeps results in a list, or takes them from it: as often as it is entered, since a backward that is split in two
    (zero-bubble pipelines) repeats the computation twice."""

    def __init__(self, results: list[Any], *, is_replay: bool) -> None:
        self._results, self._is_replay = results, is_replay

    def __enter__(self) -> None:
        self._outer = getattr(_current, "record", None)
        _current.record = (iter(list(self._results)) if self._is_replay else None, self._results)

    def __exit__(self, *error: object) -> None:
        _current.record = self._outer


def compute_once(compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """``compute(*args)``, or what it gave when the computation under repetition was first run."""
    record = getattr(_current, "record", None)
    if record is None:
        return compute(*args)
    replay, results = record
    if replay is not None:
        return next(replay).detach()
    result = compute(*args)
    results.append(result.detach())  # an alias: autograd will hang its graph on the tensor that is returned
    return result


def is_recording() -> bool:
    """Whether results are kept for, or taken in, a repetition."""
    return getattr(_current, "record", None) is not None


def is_replaying() -> bool:
    """Whether this is the repetition."""
    record = getattr(_current, "record", None)
    return record is not None and record[0] is not None


def exchange_row_counts(num_rows: int, group: Group, device: torch.device) -> list[int]:
    """Rows of every rank of the group, in rank order. Waits for the device once."""
    if group is None:
        return [num_rows]
    mine = torch.tensor([num_rows], dtype=torch.int64, device=device)
    counts = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather_single(counts, mine, group=group)
    return counts.tolist()


def all_gather_rows(x: Tensor, group: Group, rows_per_rank: list[int] | None = None) -> Tensor:
    """[T_r, ...] on rank r -> [sum T_r, ...] on every rank; the backward sums gradients over ranks."""
    return x if group is None else _AllGather.apply(x, group, rows_per_rank)


def reduce_scatter_rows(x: Tensor, group: Group, rows_per_rank: list[int] | None = None) -> Tensor:
    """[sum T_r, ...] on every rank -> the sum over ranks of this rank's rows [T_r, ...]."""
    return x if group is None else _ReduceScatter.apply(x, group, rows_per_rank)


def all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Blocks of ``send`` rows go to the ranks of the group, blocks of ``receive`` rows come back, in rank order."""
    return x if group is None else _AllToAll.apply(x, send, receive, group)


def start_all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> PendingRows:
    """``all_to_all_rows`` started: what is queued before ``wait`` is computed beside it, and in the backward that
    whose forward lies between the two."""
    pending = _PendingAllToAll(send, receive, group)
    return PendingRows(_StartAllToAll.apply(x, pending), pending)


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """The same x on all ranks, each of which uses it for a part of the work; the backward sums their gradients."""
    return x if group is None else _AllReduce.apply(x, group, False, True)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x on all of them, which then all do the same; the backward hands the gradient on."""
    return x if group is None else _AllReduce.apply(x, group, True, False)


def sum_over_ranks_both_ways(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x on all of them, each of which uses it for a part of the work; the backward sums too."""
    return x if group is None else _AllReduce.apply(x, group, True, True)


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """[T, V_r] on rank r -> [T, sum V_r] on all ranks, which then all do the same; equal V_r on all ranks."""
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
    """What the two ends of an all-to-all know of each other, in the forward and for the gradients in the backward."""

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.send, self.receive, self.group = send, receive, group
        self.started: AsyncCollective | None = None

    def start(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Begins to exchange x; what is returned fills up until ``end``."""
        self.started = start_all_to_all(x, send, receive, self.group)
        return self.started.result

    def end(self) -> Tensor:
        assert self.started is not None
        out, self.started = self.started.wait(), None
        return out


class PendingRows:
    """Rows on their way; ``wait`` is to be called once."""

    def __init__(self, sent: Tensor, pending: _PendingAllToAll) -> None:
        self._sent, self._pending = sent, pending

    def wait(self) -> Tensor:
        return _EndAllToAll.apply(self._sent, self._pending)


class _StartAllToAll(torch.autograd.Function):
    """Its output only ties the two ends together: rows that have not arrived must not be seen by autograd."""

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
    """Communication under way. Work that does not need its result is queued before ``wait``."""

    def __init__(
        self,
        works: dist.Work | list[dist.Work],
        result: Tensor,
        source: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._works = works if isinstance(works, list) else [works]
        self.result = result  # not there before ``wait``
        self._source = source  # must live until it has been read
        self._finish = finish  # what is left to be done with the result

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self.result if self._finish is None else self._finish(self.result)


def start_all_gather(x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None = None) -> AsyncCollective:
    """[T_r, ...] on rank r -> [sum T_r, ...]; outside autograd."""
    x = _padded(_to_send(x), rows_per_rank)
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    work = all_gather_single(out, x, group=group, async_op=True)
    return AsyncCollective(
        work, out, x, None if rows_per_rank is None else lambda out: _without_padding(out, rows_per_rank)
    )


def start_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, rows_per_rank: list[int] | None = None
) -> AsyncCollective:
    """[sum T_r, ...] of each rank -> this rank's T_r rows of their sum; outside autograd."""
    x = _with_padding(_to_send(x), rows_per_rank)
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    work = reduce_scatter_single(out, x, group=group, async_op=True)
    rows = None if rows_per_rank is None else rows_per_rank[dist.get_rank(group)]
    return AsyncCollective(work, out, x, None if rows is None else lambda out: out[:rows])


def start_all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> AsyncCollective:
    """As ``all_to_all_rows``; outside autograd."""
    x, out = _to_send(x), x.new_empty(sum(receive), *x.shape[1:])
    return AsyncCollective(dist.all_to_all_single(out, x, receive, send, group=group, async_op=True), out, x)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> AsyncCollective:
    """The ranks' sum, in place; outside autograd."""
    return AsyncCollective(dist.all_reduce(x, group=group, async_op=True), x, x)


def start_ring_shift(x: Tensor, out: Tensor, step: int, group: dist.ProcessGroup) -> AsyncCollective:
    """x goes to the rank ``step`` places on in the group, round and round; ``out`` is filled by the one as far before.

    Both are contiguous. Point-to-point, and outside autograd. All ranks call it with the same step.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + step) % size)
    previous = dist.get_global_rank(group, (rank - step) % size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, _to_send(x), following, group), dist.P2POp(dist.irecv, out, previous, group)]
    )
    return AsyncCollective(works, out, x)


def all_gather_blocks(x: Tensor, out: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its x) for every rank of the group, this one first and the others as they come.

    [T, ...] each, contiguous; they come to lie in ``out`` [size * T, ...], but for this rank's own. Outside autograd.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    blocks = out.chunk(size)
    arriving = [start_ring_shift(x, blocks[(rank - step) % size], step, group) for step in range(1, size)]
    yield rank, x
    for step, started in enumerate(arriving, start=1):
        yield (rank - step) % size, started.wait()


def all_gather_without_grad(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``start_all_gather`` and its end."""
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
    """Without its graph: a library's threads let go of what was sent, and of its graph, some time after ``wait``."""
    return x.detach().contiguous()


def _padded(x: Tensor, rows_per_rank: list[int] | None) -> Tensor:
    """Rows of zeros up to the largest rank's count: the backends move equal blocks only."""
    if rows_per_rank is None or x.shape[0] == max(rows_per_rank):
        return x
    return torch.cat([x, x.new_zeros(max(rows_per_rank) - x.shape[0], *x.shape[1:])])


def _with_padding(x: Tensor, rows_per_rank: list[int] | None) -> Tensor:
    """All ranks' rows, each rank's padded."""
    if rows_per_rank is None:
        return x
    return torch.cat([_padded(block, rows_per_rank) for block in x.split(rows_per_rank)])


def _without_padding(x: Tensor, rows_per_rank: list[int]) -> Tensor:
    blocks = x.view(len(rows_per_rank), -1, *x.shape[1:])
    return torch.cat([block[:rows] for block, rows in zip(blocks, rows_per_rank, strict=True)])
