"""Collectives with a backward: values and gradients on two ranks, with equal and with different numbers of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.optimus.platform import collectives
from tests.helpers import run_distributed

COUNTS = [3, 1]  # rows of each rank


def rows(rank: int, count: int) -> Tensor:
    """Row i of rank r is [10 r + i, -(10 r + i)]."""
    numbers = torch.arange(count, dtype=torch.float32) + 10 * rank
    return torch.stack([numbers, -numbers], dim=1)


def both(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[list[list[float]], list[list[float]]]:
    """The result, and the gradient of ``x`` where the result's is ``grad``."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(grad)
    assert x.grad is not None
    return y.tolist(), x.grad.tolist()


def of_rank(rank: int, world: int) -> dict[str, object]:
    group, found = dist.group.WORLD, {}
    assert group is not None
    own, four = rows(rank, COUNTS[rank]), torch.ones(4, 2) * (rank + 1)
    found["counts"] = collectives.exchange_row_counts(len(own), group, torch.device("cpu"))
    found["gather"] = both(lambda x: collectives.all_gather_rows(x, group, COUNTS), own, four)
    found["gather equal"] = both(lambda x: collectives.all_gather_rows(x, group), rows(rank, 2), four)
    found["scatter"] = both(
        lambda x: collectives.reduce_scatter_rows(x, group, COUNTS), rows(0, 4) * (rank + 1), rows(rank, COUNTS[rank])
    )
    send, receive = ([1, 2], [1, 0]) if rank == 0 else ([0, 1], [2, 1])
    found["all to all"] = both(
        lambda x: collectives.all_to_all_rows(x, send, receive, group), own[: sum(send)], rows(rank, sum(receive))
    )
    found["started"] = both(
        lambda x: collectives.start_all_to_all_rows(x, send, receive, group).wait(),
        own[: sum(send)],
        rows(rank, sum(receive)),
    )
    for name in ("copy_to_ranks", "sum_over_ranks", "sum_over_ranks_both_ways"):
        function = getattr(collectives, name)
        found[name] = both(
            lambda x, function=function: function(x, group), rows(rank, 1), torch.full((1, 2), rank + 1.0)
        )
    found["columns"] = both(lambda x: collectives.gather_columns(x, group), rows(rank, 2), rows(0, 2).repeat(1, 2))
    out = torch.full((4, 2), -1.0)
    found["blocks"] = [(of, block.tolist()) for of, block in collectives.all_gather_blocks(rows(rank, 2), out, group)]
    # Under recomputation nothing is sent: the second context returns what the first one kept.
    first, again = collectives.recording_contexts()
    with first:
        kept = collectives.all_gather_rows(own, group, COUNTS)
    with again:
        assert collectives.is_replaying()
        found["replayed"] = torch.equal(collectives.all_gather_rows(own * 0, group, COUNTS), kept)
    found["alone"] = collectives.all_gather_rows(own, None) is own
    return found


def test_values_and_gradients_of_two_ranks() -> None:
    first, second = run_distributed(of_rank, 2)
    r = [rows(rank, 3).tolist() for rank in (0, 1)]
    every = [*r[0], r[1][0]]
    three = [[3.0, 3.0]]  # of a sum of gradients 1 and 2
    for rank, found in enumerate((first, second)):
        count = COUNTS[rank]
        assert found["counts"] == COUNTS and found["replayed"] and found["alone"]
        assert found["gather"] == (every, three * count)
        assert found["gather equal"] == ([*r[0][:2], *r[1][:2]], three * 2)
        sums = (3 * rows(0, 4)).tolist()
        assert found["scatter"] == (sums[3 * rank : 3 * rank + count], every)
        assert found["columns"] == (torch.cat([rows(0, 2), rows(1, 2)], dim=1).tolist(), rows(0, 2).tolist())
        total = [[10.0, -10.0]]
        assert found["copy_to_ranks"] == (r[rank][:1], three)
        assert found["sum_over_ranks"] == (total, [[rank + 1.0] * 2])
        assert found["sum_over_ranks_both_ways"] == (total, three)
        assert found["blocks"] == [(rank, r[rank][:2]), (1 - rank, r[1 - rank][:2])]
        assert found["started"] == found["all to all"]
    # Rank 0 keeps a row and sends two; rank 1 keeps its own. Gradients go back where the rows came from.
    assert first["all to all"] == (r[0][:1], [r[0][0], *r[1][:2]])
    assert second["all to all"] == ([*r[0][1:], r[1][0]], [r[1][2]])
