"""The declared collectives and communicators against those of real steps."""

from __future__ import annotations

import pytest

from megatron.optimus.config.costs import FP32
from megatron.optimus.config.rank_plan import RankPlan, rank_plans
from megatron.optimus.models.activations import CPU
from megatron.optimus.parallel.traffic import num_communicators
from megatron.optimus.planner.communication import collectives
from tests.helpers import run_distributed
from tests.unit.planner.cases import MIXED, MOE, SHARED, collectives_of_a_step, run, runnable

# Half the micro-batches of the other tests: two in a rank's step at least.
SHORT = "--global-batch-size 8 "
SENT = {
    2: [
        SHORT,
        SHORT + "--tensor-model-parallel-size 2 --no-sequence-parallel",
        SHORT + "--tensor-model-parallel-size 2",
        SHORT + "--tensor-model-parallel-size 2 --tp-comm-overlap",
        SHORT + "--context-parallel-size 2",
        SHORT + "--context-parallel-size 2 --cp-comm-type p2p",
        SHORT + "--context-parallel-size 2 --cp-comm-type p2p --num-query-groups 2 --recompute-modules attention",
        SHORT + MOE + "--pipeline-model-parallel-size 2",
        SHORT + "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b "
        "--virtual-pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights",
    ],
    4: [
        MOE + "--expert-model-parallel-size 2",
        SHORT + MIXED + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        SHORT + MIXED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        MOE + "--expert-model-parallel-size 2 --zero-stage 2 --moe-router-load-balancing-type global_aux_loss",
        SHORT + MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        SHORT + SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        SHORT + "--tensor-model-parallel-size 4 --tp-comm-overlap",
        SHORT + "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --virtual-pipeline-model-parallel-size 2",
    ],
}


@pytest.mark.parametrize("world", SENT)
def test_collectives_are_those_of_a_real_step(world: int) -> None:
    cases = [words for words in SENT[world] if runnable(words)]
    found = run_distributed(collectives_of_a_step, world, cases)
    for rank, of_cases in enumerate(found):
        for words, (measured, groups) in zip(cases, of_cases, strict=True):
            members = rank_plans(run(words), world)
            assert measured == _sent_by_kind(members[rank // (world // len(members))]), (words, rank)
            assert groups == num_communicators(members[0]), (words, rank)


def _sent_by_kind(share: RankPlan) -> dict[str, int]:
    planned: dict[str, int] = {}
    for one in collectives(share, CPU):
        planned[one.kind.value] = planned.get(one.kind.value, 0) + one.payload * one.count
    if share.layout.tp > 1 and share.has_head:  # two numbers a token and rank between the parts of the vocabulary
        extra = 2 * FP32 * share.tokens * share.layout.tp * share.micro_batches
        planned["all-gather"] = planned.get("all-gather", 0) + extra
    return planned
