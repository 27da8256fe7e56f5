"""Declared messages of tensor, context and pipeline parallelism and communicators, counted by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

from megatron.optimus.config.costs import FP32, Collective, CollectiveKind
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import RankPlan, rank_plans
from megatron.optimus.parallel.traffic import (
    context_traffic,
    num_communicators,
    partial_gradient_traffic,
    pipeline_traffic,
    tensor_traffic,
)

# Three micro-batches of 64 tokens, each 64 numbers of 2 bytes: 8,192 bytes; four dense layers of two regions each.
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --vocab-size 512 --seq-length 32 "
    "--micro-batch-size 2 --params-dtype bf16 --global-batch-size 6 "
)
WHOLE, REGIONS = 8192, 3 * 4 * 2
NORMS = {CollectiveKind.ALL_REDUCE: 3 * 4 * 4 * FP32 * 64}  # squares of queries and keys, both ways


def ranks(words: str, world: int) -> list[RankPlan]:
    return rank_plans(load((BASE + words).split()).config, world)


def bytes_by_kind(found: Iterable[Collective]) -> dict[CollectiveKind, int]:
    total: dict[CollectiveKind, int] = defaultdict(int)
    for one in found:
        total[one.kind] += one.payload * one.count
    return dict(total)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Tokens into a region, again in its backward, and gradients into it; embedding and head once a micro-batch.
        (
            "",
            {
                CollectiveKind.ALL_GATHER: (3 * REGIONS + 2 * 3) * WHOLE,
                CollectiveKind.REDUCE_SCATTER: (2 * REGIONS + 2 * 3) * WHOLE,
            },
        ),
        ("--no-sequence-parallel", {CollectiveKind.ALL_REDUCE: (2 * REGIONS + 2 * 3) * WHOLE}),
        # Half of the tokens of the other rank, three times; what has something beside it goes as before.
        (
            "--tp-comm-overlap",
            {
                CollectiveKind.ALL_GATHER: (REGIONS + 2 * 3) * WHOLE,
                CollectiveKind.REDUCE_SCATTER: (REGIONS + 2 * 3) * WHOLE,
                CollectiveKind.SEND: 3 * REGIONS * WHOLE // 2,
            },
        ),
    ],
)
def test_tensor_parallelism(words: str, expected: dict[CollectiveKind, int]) -> None:
    [rank] = ranks(f"--tensor-model-parallel-size 2 {words}", 2)
    everything = {kind: expected.get(kind, 0) + NORMS.get(kind, 0) for kind in {*expected, *NORMS}}
    assert bytes_by_kind(tensor_traffic(rank)) == everything
    [without] = ranks("--tensor-model-parallel-size 2 --no-qk-layernorm " + words, 2)
    assert bytes_by_kind(tensor_traffic(without)) == expected


def test_context_parallelism() -> None:
    """A rank has half of the positions: 32 x 64 elements each of queries, keys and values."""
    elements, count = 32 * 64, 4 * 3
    [ulysses] = ranks("--context-parallel-size 2", 2)
    assert bytes_by_kind(context_traffic(ulysses)) == {CollectiveKind.ALL_TO_ALL: 2 * count * 2 * (3 + 1) * elements}
    [ring] = ranks("--context-parallel-size 2 --cp-comm-type p2p", 2)
    forth, gradients, back = 2 * count * 2 * 2 * elements, count * 2 * FP32 * elements, count * 2 * 2 * elements
    assert bytes_by_kind(context_traffic(ring)) == {CollectiveKind.SEND: forth + gradients + back}


def test_pipelines() -> None:
    first, second = ranks("--pipeline-model-parallel-size 2", 2)
    assert [one.purpose for one in pipeline_traffic(first) if one.count] == ["activations"]
    assert [one.purpose for one in pipeline_traffic(second) if one.count] == ["gradients of activations"]
    for rank in (first, second):
        assert bytes_by_kind(pipeline_traffic(rank)) == {CollectiveKind.SEND: 3 * WHOLE}
    first, _ = ranks(
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --virtual-pipeline-model-parallel-size 2", 2
    )
    # The first and the last stage: one message each way; the turn of the V is on the other rank.
    assert bytes_by_kind(pipeline_traffic(first)) == {CollectiveKind.SEND: 2 * 3 * WHOLE}


def test_gradients_of_what_tensor_parallel_ranks_share() -> None:
    [rank] = ranks("--tensor-model-parallel-size 2", 2)
    norms = (2 * 4 + 1) * 64  # two a layer and the last one
    assert bytes_by_kind(partial_gradient_traffic(rank)) == {CollectiveKind.ALL_REDUCE: 3 * FP32 * norms}
    [whole] = ranks("--tensor-model-parallel-size 2 --no-sequence-parallel", 2)
    assert list(partial_gradient_traffic(whole)) == []


@pytest.mark.parametrize("traffic", [tensor_traffic, context_traffic, pipeline_traffic, partial_gradient_traffic])
def test_data_parallel_ranks_send_nothing_of_it(traffic: Callable[[RankPlan], Iterable[Collective]]) -> None:
    assert list(traffic(ranks("", 1)[0])) == []


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        ("", 1, 0),
        ("", 3, 1),  # the world, which is the data-parallel group too
        ("--pipeline-model-parallel-size 2", 2, 1),
        ("--pipeline-model-parallel-size 2 --num-layers 4 --no-untie-embeddings-and-output-weights", 2, 1),
        ("--tensor-model-parallel-size 2 --global-batch-size 8", 4, 3),  # the world, pairs, and replicas
    ],
)
def test_axes_with_the_same_ranks_share_a_communicator(words: str, world: int, expected: int) -> None:
    assert num_communicators(ranks(words, world)[0]) == expected
