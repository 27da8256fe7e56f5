"""The planner's arithmetic against what the real program holds, keeps and sends."""

from __future__ import annotations

import pytest

from megatron.optimus.config.checks import check
from megatron.optimus.config.costs import FP32
from megatron.optimus.config.load import load
from megatron.optimus.config.rank_plan import RankPlan, rank_plans
from megatron.optimus.models.activations import CPU, layer_parts
from megatron.optimus.models.parameters import num_parameters
from megatron.optimus.parallel.traffic import num_communicators
from megatron.optimus.planner.communication import collectives
from megatron.optimus.planner.memory import memory_of
from tests.helpers import run_distributed
from tests.unit.planner.cases import (
    MIXED,
    MOE,
    SHARED,
    alone_in_worlds,
    bytes_kept,
    collectives_of_a_step,
    peaks_of_parts,
    run,
    states_in_fake_worlds,
)

# (options, rank, ranks). The last one is the paper's model and layout on 1,024 nodes of Aurora.
WORLDS = [
    ("", 0, 1),
    ("--normalization layernorm-nonparametric --no-qk-layernorm --ddp-bucket-size 5000", 3, 4),
    (MOE + "--expert-model-parallel-size 4 --zero-stage 2", 5, 8),
    (MOE + "--zero-stage 2 --expert-model-parallel-size 2 --ddp-bucket-size 3000", 1, 4),
    (MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 2", 6, 8),
    (MOE + "--pipeline-model-parallel-size 2 --context-parallel-size 2 --optimizer-state-dtype int8", 7, 8),
    (MOE + "--no-accumulate-allreduce-grads-in-fp32 --params-dtype bf16 --optimizer muon", 1, 2),
    (SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", 6, 8),
    (SHARED + "--no-weight-decay-biases --optimizer muon", 1, 8),
    (MIXED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", 6, 8),
    (MIXED + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2", 1, 4),
    ("--pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights --optimizer lion", 3, 4),
    ("--num-query-groups 2 --qk-layernorm-scope head --tensor-model-parallel-size 2 --optimizer sgd", 1, 4),
    ("--no-weight-decay-norms --no-weight-decay-embeddings --grad-reduce-in-bf16 --zero-stage 2", 0, 2),
    ("--preset mula-220b-a10b --global-batch-size 12288", 12287, 12288),
]


def test_parameters_and_states_are_those_of_the_real_optimizer() -> None:
    [built] = run_distributed(states_in_fake_worlds, 1, WORLDS, timeout=200)
    for (words, rank, world), (numel, sizes) in zip(WORLDS, built, strict=True):
        config = load(words.split()).config if words.startswith("--preset") else run(words)
        members = rank_plans(config, world)
        share = members[rank // (world // len(members))]
        states = memory_of(share).states
        planned = dict(
            parameters=states.parameters, gradients=states.gradients, masters=states.masters, states=states.states
        )
        assert num_parameters(share) == numel, words
        assert planned == {key: sizes[key] for key in planned}, words


KEPT = {
    1: [
        "",
        MOE,
        MOE + "--recompute-modules moe",
        SHARED,
        SHARED + "--recompute-modules moe",
        SHARED + "--no-moe-shared-expert-gate",
        MOE + "--recompute-modules moe attention norm",
        "--recompute-modules attention",
        "--recompute-modules moe norm",
        "--normalization layernorm-nonparametric --no-qk-layernorm",
        "--num-query-groups 2 --clip-qkv 3.0",
    ],
    2: [
        MOE + "--expert-model-parallel-size 2",
        MOE + "--expert-model-parallel-size 2 --recompute-modules moe",
        MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
        SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
        SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --recompute-modules moe",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --tp-comm-overlap",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type p2p",
    ],
}


@pytest.mark.parametrize("world", KEPT)
def test_activations_of_a_layer_are_what_a_forward_leaves(world: int) -> None:
    """Of two more layers, so that what all layers share drops out."""
    cases = KEPT[world]
    deep = [words + " --num-layers 3" for words in cases]
    deep_and_shallow = deep + [words + " --num-layers 1" for words in cases]
    [found] = run_distributed(alone_in_worlds, 1, bytes_kept, [0], world, deep_and_shallow)
    kept = [rank_0 for [rank_0] in found]
    for words, more, fewer in zip(deep, kept, kept[len(deep) :], strict=False):
        config = run(words)
        check(config, world)
        planned = memory_of(rank_plans(config, world)[0], CPU).saved_per_layer[0]
        assert planned == pytest.approx((more - fewer) / 2, rel=0.01), words


RING = "--cp-comm-type p2p --seq-length 512 --max-position-embeddings 512 "
BLOCKS = "--tp-comm-overlap --seq-length 512 --max-position-embeddings 512 "
# On four ranks: (options, what of which part is planned to the byte; the rest may be planned higher, never lower).
PEAKS = [
    (RING + "--context-parallel-size 4", ["attention forward", "attention backward"]),
    (RING + "--context-parallel-size 4 --num-query-groups 2", ["attention forward", "attention backward"]),
    (
        RING + "--context-parallel-size 4 --params-dtype bf16 --no-qk-layernorm",
        ["attention forward", "attention backward"],
    ),
    (RING + "--context-parallel-size 2", ["attention forward", "attention backward"]),
    (RING + "--context-parallel-size 2 --tensor-model-parallel-size 2 --num-query-groups 2", ["attention backward"]),
    (BLOCKS + "--tensor-model-parallel-size 4", ["mlp forward"]),
    (BLOCKS + "--tensor-model-parallel-size 2", ["mlp forward"]),
    (BLOCKS.replace("--tp-comm-overlap", "") + "--tensor-model-parallel-size 4", ["mlp forward"]),
]


def test_peaks_of_rings_and_of_blocks_on_their_way_are_those_of_a_real_layer() -> None:
    [found] = run_distributed(alone_in_worlds, 1, peaks_of_parts, [0, 1, 2, 3], 4, [words for words, _ in PEAKS])
    for ranks, (words, exact) in zip(found, PEAKS, strict=True):
        config = run(words)
        check(config, 4)
        within = 0.02 if "bf16" in words else 0.01  # log-sum-exps, left out, weigh more
        parts = {
            part.name: part
            for part in layer_parts(rank_plans(config, 4)[0], CPU, frozenset(), is_moe=False, offload=False)
        }
        for name in ranks[0]:
            part, (forward, backward) = parts[name], (max(each[name][i] for each in ranks) for i in range(2))
            for moment, planned, counted in (
                ("forward", part.saved + part.forward, forward),
                ("backward", part.saved + part.backward, backward),
            ):
                assert planned >= (1 - within) * counted, (words, name, moment)
                if f"{name} {moment}" in exact:
                    assert planned == pytest.approx(counted, rel=within), (words, name, moment)


SENT = {
    2: [
        "",
        "--tensor-model-parallel-size 2 --no-sequence-parallel",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --tp-comm-overlap",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type p2p",
        "--context-parallel-size 2 --cp-comm-type p2p --num-query-groups 2 --recompute-modules attention",
        MOE + "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b "
        "--virtual-pipeline-model-parallel-size 2 --no-untie-embeddings-and-output-weights",
    ],
    4: [
        MOE + "--expert-model-parallel-size 2",
        MIXED + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        MIXED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        MOE + "--expert-model-parallel-size 2 --zero-stage 2 --moe-router-load-balancing-type global_aux_loss",
        MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        SHARED + "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        "--tensor-model-parallel-size 4 --tp-comm-overlap",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --virtual-pipeline-model-parallel-size 2",
    ],
}


@pytest.mark.parametrize("world", SENT)
def test_collectives_are_those_of_a_real_step(world: int) -> None:
    found = run_distributed(collectives_of_a_step, world, SENT[world])
    for rank, of_cases in enumerate(found):
        for words, (measured, groups) in zip(SENT[world], of_cases, strict=True):
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
