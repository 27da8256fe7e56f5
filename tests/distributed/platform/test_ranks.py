"""What fails on some ranks alone is an error on all of them, and one rank speaks for all."""

from __future__ import annotations

import errno

import pytest
import torch.distributed as dist

from megatron.optimus.platform.ranks import REPORTED_BY_ANOTHER_RANK, Ranks
from tests.helpers import run_distributed


def _fail_on(rank: int, world: int, failing: tuple[int, ...]) -> tuple[str, bool] | int:
    def action() -> int:
        if rank in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rank * 10

    try:
        result: tuple[str, bool] | int = Ranks(None, "cpu").run_on_all_ranks(action, "writing", ValueError)
    except ValueError as error:
        result = str(error), getattr(error, REPORTED_BY_ANOTHER_RANK)
    dist.barrier()  # nobody was left behind in another collective
    return result


def test_success_gives_each_rank_its_result() -> None:
    assert run_distributed(_fail_on, 3, ()) == [0, 10, 20]


@pytest.mark.parametrize("failing", [(1,), (1, 2), (0,)])
def test_a_failure_is_everybodys_error_and_told_once(failing: tuple[int, ...]) -> None:
    results = run_distributed(_fail_on, 3, failing)
    for rank, (message, is_relayed) in enumerate(results):
        assert f"writing failed on rank {rank if rank in failing else failing[0]}" in message
        assert "No space left" in message
        assert is_relayed == (rank != failing[0])
