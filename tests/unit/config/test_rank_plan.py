"""What a rank of a pipeline holds and has in flight."""

from __future__ import annotations

import pytest

from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import first_of_each_kind, rank_plans
from megatron.optimus.planner.pipeline import rank_order

INTERLEAVED = "--pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2"


@pytest.mark.parametrize("schedule", ["", INTERLEAVED])
@pytest.mark.parametrize("micro_batches", [2, 4, 12])
def test_chunks_in_flight_are_the_most_that_wait_in_the_schedules_order(schedule: str, micro_batches: int) -> None:
    words = f"--preset mula-1b --micro-batch-size 1 --global-batch-size {micro_batches} {schedule}"
    for rank in rank_plans(load(f"{words} --pipeline-model-parallel-size 4".split()).config, 4):
        order = rank_order(rank.pipeline_rank, 4, len(rank.stages), micro_batches)
        waiting, most = 0, 0
        for is_backward, _, _ in order:
            waiting += -1 if is_backward else 1
            most = max(most, waiting)
        assert rank.chunks_in_flight == most, rank.pipeline_rank


def test_ranks_together_hold_every_layer_once_and_few_kinds_differ() -> None:
    words = "--preset mula-20b-a2b --pipeline-model-parallel-size 8 --global-batch-size 16"
    ranks = rank_plans(load(words.split()).config, 96)
    layers = [layer for rank in ranks for chunk in rank.chunks for layer in chunk]
    assert sorted(layers) == list(range(ranks[0].model.num_layers))
    assert [rank.has_embedding for rank in ranks] == [True] + 7 * [False]
    assert [rank.has_head for rank in ranks] == 7 * [False] + [True]
    assert first_of_each_kind(ranks)[0] is ranks[0] and len(first_of_each_kind(ranks)) < 8
