"""A server over several ranks, of which the first decides and the others follow, gives what one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.inference.generate import Limits
from megatron.optimus.inference.sampling import Sampling
from megatron.optimus.inference.server.engine import Engine
from megatron.optimus.inference.server.metrics import Metrics
from megatron.optimus.inference.server.scheduler import Scheduler, ServedRequest, Update
from megatron.optimus.platform.ranks import Ranks
from tests.helpers import run_distributed
from tests.unit.inference.cases import checkpoint, loaded, prompts


def served(path: Path, ranks: Ranks, parallel: dict[str, int]) -> list[list[int]] | None:
    """The tokens of nine requests that join a running batch, two at a time; None on the ranks that follow."""
    engine = Engine(loaded(path, ranks, **parallel), ranks, pages=24)
    if ranks.rank > 0:
        engine.follow()
        return None
    scheduler = Scheduler(engine, Metrics(), max_batch=4, max_step_tokens=16, max_waiting=9)
    found: list[list[Update]] = [[] for _ in range(9)]
    waiting = [
        ServedRequest(engine.loaded, ids, Sampling(temperature=0.7, seed=2), Limits(9), number, found[number].append,
                      scores_prompt=number % 2 == 0)
        for number, ids in enumerate(prompts(9))
    ]  # fmt: skip
    while waiting or not scheduler.is_idle:
        scheduler.submit(waiting[:2])
        waiting = waiting[2:]
        if not scheduler.step():
            engine.idle()
    engine.stop()
    return [[token.id for update in updates for token in update.tokens] for updates in found]


def on_a_rank(rank: int, world_size: int, path: Path, parallel: dict[str, int]) -> list[list[int]] | None:
    return served(path, Ranks(None, "cpu"), parallel)


@pytest.mark.parametrize("parallel", [dict(tensor_model_parallel_size=2), dict(expert_model_parallel_size=2)])
def test_two_ranks_give_what_one_gives(parallel: dict[str, int], tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "moe")
    alone = served(path, Ranks.alone(), {})
    assert run_distributed(on_a_rank, 2, path, parallel) == [alone, None]
    assert alone is not None and all(alone)
