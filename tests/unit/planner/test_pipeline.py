"""Bubbles of pipelines whose ranks have different loads, against torch's own order of work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.optimus.config.layout import Layout
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.planner.hardware import H200
from megatron.optimus.planner.pipeline import rank_order, seconds_of
from megatron.optimus.planner.plan import plan
from megatron.optimus.planner.report import plan_text
from megatron.optimus.planner.step_time import busy
from tests.unit.parallel.test_pipeline_stages import KIND, actions_of

INTERLEAVED = "--pipeline-schedule interleaved-1f1b --virtual-pipeline-model-parallel-size 2 "
# (options, layers of the pipeline ranks). The head is on the last stage, which is short for it, or by decree.
PIPELINES = [
    ("--pipeline-model-parallel-size 2", "9, 7 (split for the slowest rank, the head included)"),
    ("--pipeline-model-parallel-size 4", "5, 2 x 4, 3 (split"),
    ("--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 1", "3 x 5, 1 (as fixed by the options)"),
    ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 15", "1, 15 (as fixed"),
    (INTERLEAVED + "--pipeline-model-parallel-size 2", "5+4, 4+3 (split"),
    (INTERLEAVED + "--pipeline-model-parallel-size 4", "3+2, 2 x 2+2, 2+1 (split"),
]


@pytest.mark.parametrize("words, split", PIPELINES)
def test_a_pipeline_waits_as_torchs_schedule_does_with_the_loads_of_its_stages(words: str, split: str) -> None:
    for micro_batches in (4, 16, 64):
        batch = f"--preset mula-1b --micro-batch-size 2 --global-batch-size {2 * micro_batches}"
        config = load(f"{batch} {words}".split()).config
        pp = config.parallel.pipeline_model_parallel_size
        made = plan(config, pp, H200)
        assert f"layers of the pipeline ranks: {split}" in plan_text(made, explain=False)
        times = alone(made)
        simulated = seconds_of(orders_of_torch(pp, len(times) // pp, micro_batches), times)
        planned = made.time.compute + made.time.exposed + made.time.bubble
        assert planned == pytest.approx(simulated, rel=0.01), micro_batches


def alone(made: Any) -> list[float]:
    """Seconds of each stage for one micro-batch, each on a rank of its own."""
    layers = made.ranks[0].layers
    one_each = replace(
        made.config.parallel,
        pipeline_model_parallel_size=len(layers),
        virtual_pipeline_model_parallel_size=1,
        pipeline_schedule=PipelineSchedule.ONE_F_ONE_B,
    )
    layout, config = Layout.from_config(one_each, len(layers)), replace(made.config, parallel=one_each)
    stages = [RankPlan(config, layout, layers, stage) for stage in range(len(layers))]
    return [sum(busy(share, H200)[:2]) / share.micro_batches for share in stages]


def orders_of_torch(pp: int, chunks: int, micro_batches: int) -> list[Any]:
    """What the ranks compute, as torch's schedules have it."""
    if chunks == 1:
        return [one_f_one_b(rank, pp, micro_batches) for rank in range(pp)]
    computing = (KIND.FORWARD, KIND.FULL_BACKWARD)
    return [
        [
            (action.computation_type == KIND.FULL_BACKWARD, action.stage_index, action.microbatch_index)
            for action in actions
            if action.computation_type in computing
        ]
        for _, actions in sorted(actions_of(pp, chunks, micro_batches).items())
    ]


def one_f_one_b(rank: int, pp: int, micro_batches: int) -> list[Any]:
    """torch's Schedule1F1B has no list of its actions: forwards until the first gradient comes, then by turns."""
    num_warmup = min(pp - rank, micro_batches) if micro_batches >= pp else micro_batches
    forwards, backwards = ([(kind, rank, number) for number in range(micro_batches)] for kind in (False, True))
    turns = [action for pair in zip(backwards, forwards[num_warmup:], strict=False) for action in pair]
    return [*forwards[:num_warmup], *turns, *backwards[micro_batches - num_warmup :]]


def test_ranks_compute_in_the_order_of_torchs_schedules() -> None:
    for pp, chunks, micro_batches in (
        (2, 1, 5),
        (4, 1, 3),
        (4, 1, 4),
        (3, 2, 12),
        (4, 2, 3),
        (4, 4, 16),
        (8, 2, 32),
        (2, 3, 2),
    ):
        planned = [rank_order(rank, pp, chunks, micro_batches) for rank in range(pp)]
        assert planned == orders_of_torch(pp, chunks, micro_batches)
