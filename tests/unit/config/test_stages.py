"""Layers of pipeline stages."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.config.costs import head_cost, layer_cost
from megatron.optimus.config.load import load
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.stages import check_micro_batches, layers_of_stages, stage_layers, stages_of_rank

LAYER = 1_000  # the cost of layers that are all alike


def sizes(num_layers: int, pp: int, *, head: float = 0.0, **options: int) -> list[int]:
    """Of layers that are all alike; ``head``: what the head is worth, in layers."""
    return [len(part) for part in layers_of_stages([LAYER] * num_layers, pp, head_cost=round(head * LAYER), **options)]


def asked_for(words: str) -> list[int]:
    config = load(words.split()).config
    return [len(part) for part in stage_layers(config.model, config.parallel, config.training.seq_length)]


def test_an_equal_split_where_none_is_faster() -> None:
    assert sizes(64, 8, head=1.0) == [8] * 8  # a layer less for the head's stage would be one more elsewhere
    assert sizes(64, 8, head=1.1) == [9, 8, 8, 8, 8, 8, 8, 7]
    assert sizes(16, 2, head=1.5) == [9, 7]


def test_an_uneven_split_spares_the_stage_of_the_head() -> None:
    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(10, 4, head=1.2) == [3, 3, 3, 1]


def test_chunks_are_balanced_over_the_ranks_that_hold_them() -> None:
    """Ranks hold stages (s, s + 4); with the head as 1.5 layers the last one gets 3 of 16, no rank more than 5."""
    split = sizes(16, 4, chunks=2, head=1.5)
    assert [split[rank] + split[rank + 4] for rank in range(4)] == [5, 4, 4, 3]
    assert split[7] == 1
    in_v = sizes(16, 4, chunks=2, v_shape=True, head=1.5)  # the head is on the rank of the first stage
    assert [in_v[rank] + in_v[7 - rank] for rank in range(4)] == [3, 5, 4, 4]
    assert sizes(16, 4, chunks=2) == [2] * 8


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.floats(0, 4), st.booleans())
def test_no_split_of_layers_alike_has_a_faster_slowest_rank(
    pp: int, chunks: int, more: int, head: float, v: bool
) -> None:
    """Against the bound by counting: whole layers dealt to ranks, at least one a stage."""
    chunks, head = 2 if v else chunks, round(head * LAYER) / LAYER
    split = sizes(pp * chunks + more, pp, chunks=chunks, v_shape=v, head=head)
    last = next(rank for rank in range(pp) if pp * chunks - 1 in stages_of_rank(rank, pp, chunks, v_shape=v))

    def slowest(with_head: int) -> float:
        others = -(-(pp * chunks + more - with_head) // (pp - 1)) if pp > 1 else 0
        return max(with_head + head, others)

    most = pp * chunks + more - (pp - 1) * chunks
    best = min(slowest(layers) for layers in (range(chunks, most + 1) if pp > 1 else [most]))
    loads = [sum(split[stage] for stage in stages_of_rank(rank, pp, chunks, v_shape=v)) for rank in range(pp)]
    assert max(load + head * (rank == last) for rank, load in enumerate(loads)) == pytest.approx(best)


PLACEMENTS = [(1, 1, False), (2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (3, 2, False)]
PLACEMENTS += [(2, 3, False), (2, 2, True), (3, 2, True), (4, 2, True)]  # pipeline ranks, chunks, V shape


def loads_of(costs: list[int], ends: list[int], head: int, ranks: list[list[int]]) -> list[int]:
    """What the ranks have to do when the stages end at these layers."""
    stages = [sum(costs[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    stages[-1] += head
    return [sum(stages[stage] for stage in mine) for mine in ranks]


def every_split(num_layers: int, num_stages: int, first: int | None, last: int | None) -> list[list[int]]:
    """The ends of the stages, of every split with a layer or more a stage."""
    splits = [[*inner, num_layers] for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]
    return [
        ends
        for ends in splits
        if ends[0] == (first or ends[0]) and num_layers - [0, *ends][-2] == (last or num_layers - [0, *ends][-2])
    ]


@pytest.mark.parametrize(("pp", "chunks", "v"), PLACEMENTS)
def test_no_split_of_layers_that_differ_has_a_faster_slowest_rank(pp: int, chunks: int, v: bool) -> None:
    """Against all splits: two kinds of layers, any costs, with and without a head, free and fixed ends."""
    draw, ranks = random.Random(0), [stages_of_rank(rank, pp, chunks, v_shape=v) for rank in range(pp)]
    stages, num_better = pp * chunks, 0
    for number in range(60):
        num_layers = draw.randint(stages, 11)
        kinds = [draw.randint(1, 40), draw.randint(1, 40)]
        costs = [draw.choice(kinds) if number % 2 else draw.randint(1, 40) for _ in range(num_layers)]
        head = draw.choice([0, draw.randint(1, 80)])
        ends: dict[str, int] = {}
        if number % 3 == 0 and stages > 1:
            ends = draw.choice([{"first": 1}, {"last": 1}, {"first": 2}, {"first": 1, "last": 2}])
            if (num_layers - sum(ends.values())) % max(1, stages - len(ends)) or num_layers < stages + 2:
                continue
            if stages == len(ends) and num_layers != sum(ends.values()):
                continue
        split = layers_of_stages(costs, pp, chunks=chunks, v_shape=v, head_cost=head, **ends)
        assert [layer for part in split for layer in part] == list(range(num_layers)) and all(split)
        assert len(split[0]) == ends.get("first", len(split[0])) and len(split[-1]) == ends.get("last", len(split[-1]))
        slowest = max(loads_of(costs, [part.stop for part in split], head, ranks))
        every = every_split(num_layers, stages, ends.get("first"), ends.get("last"))
        assert slowest == min(max(loads_of(costs, one, head, ranks)) for one in every), (costs, head, ends)
        if not ends and num_layers % stages == 0 and len(set(costs)) > 1:
            even = [num_layers // stages * (stage + 1) for stage in range(stages)]
            is_faster = slowest < max(loads_of(costs, even, head, ranks))
            num_better += is_faster
            assert is_faster or [part.stop for part in split] == even
    assert num_better or stages > 5 or pp == 1


def test_large_models_of_two_kinds_of_layers_are_split_near_the_bound() -> None:
    """More splits than anybody can try: the mean of the ranks is within a layer, and the search has an end."""
    costs = [10] + [31, 10, 10] * 31 + [31, 31]
    for pp, chunks, v in ((8, 1, False), (8, 2, False), (8, 4, False), (16, 2, True)):
        split = layers_of_stages(costs, pp, chunks=chunks, v_shape=v, head_cost=14)
        ranks = [stages_of_rank(rank, pp, chunks, v_shape=v) for rank in range(pp)]
        assert max(loads_of(costs, [part.stop for part in split], 14, ranks)) < (sum(costs) + 14) / pp + 31


LONG = "--seq-length 131072 --max-position-embeddings 131072"
# A head is worth 1.4 layers of the presets with 16 and 32 layers and 0.98 of the two large ones, at 2,048 tokens; at
# 131,072 it is worth less than 0.4.
PRESETS = {
    "mula-1b --pipeline-model-parallel-size 2": [9, 7],
    f"mula-1b --pipeline-model-parallel-size 2 {LONG}": [8, 8],
    "mula-1b --pipeline-model-parallel-size 4": [5, 4, 4, 3],
    f"mula-1b --pipeline-model-parallel-size 4 {LONG}": [4, 4, 4, 4],
    "mula-1b --pipeline-model-parallel-size 3": [6, 6, 4],
    f"mula-1b --pipeline-model-parallel-size 3 {LONG}": [6, 5, 5],
    "mula-7b-a1b --pipeline-model-parallel-size 4": [5, 4, 4, 3],
    "olmo-1b --pipeline-model-parallel-size 2": [9, 7],
    "olmoe-1b-7b --pipeline-model-parallel-size 4": [5, 4, 4, 3],
    "mula-20b-a2b --pipeline-model-parallel-size 8": [5, 4, 4, 4, 4, 4, 4, 3],
    f"mula-20b-a2b --pipeline-model-parallel-size 8 {LONG}": [4] * 8,
    "mula-100b-a7b --pipeline-model-parallel-size 8": [6] * 8,
    "mula-220b-a10b --pipeline-model-parallel-size 8": [8] * 8,
    "mula-220b-a10b --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2 "
    "--pipeline-schedule interleaved-1f1b": [8] * 8,
    "mula-220b-a10b --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2 "
    "--pipeline-schedule zbv": [8] * 8,
}


@pytest.mark.parametrize("words", PRESETS)
def test_presets_are_split_by_what_their_layers_cost(words: str) -> None:
    assert asked_for(f"--preset {words}") == PRESETS[words]


@pytest.mark.parametrize("experts", ["", "--num-experts 6 --moe-router-topk 3 --moe-ffn-hidden-size 1024 "])
def test_layers_alike_cost_as_much_as_their_attention_and_their_products(experts: str) -> None:
    """A layer costs 13 + S / 1024 and the head 16, in 2^20 multiply-adds; a router adds less than 0.01."""
    words = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 3072 --vocab-size 16384 "
        f"{experts}--max-position-embeddings 4096 --pipeline-model-parallel-size 2 --seq-length "
    )
    model = load(f"{words} 2048".split()).config.model
    cost = layer_cost(model, 2048, is_moe=model.is_moe)
    assert (cost.total - cost.router) / 2**20 == 15 and cost.router < 0.01 * 2**20 and head_cost(model) == 16 * 2**20
    assert asked_for(f"{words} 2048") == [5, 3]
    assert asked_for(f"{words} 3072") == [4, 4]  # the head is worth a layer: one less beside it makes nothing faster


def test_dense_layers_first_are_more_in_a_stage() -> None:
    """Eight dense layers and 24 whose six experts and shared ones are 7/3 of a dense MLP."""
    words = (
        "--num-layers 32 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 3072 --vocab-size 8192 "
        "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 "
        "--moe-layer-freq [0]*8+[1]*24 --max-position-embeddings 131072 --pipeline-model-parallel-size 4 "
    )
    model = load(words.split()).config.model
    costs = [layer_cost(model, 2048, is_moe=is_moe).total / 2**20 for is_moe in (False, True)]
    assert costs == [4 + 2 + 9, 4 + 2 + 21 + 64 / 1024] and head_cost(model) == 8 * 2**20
    assert asked_for(words + "--seq-length 2048") == [11, 7, 7, 7]
    # Attention of a long sequence is the same in all layers, and all that counts.
    assert asked_for(words + "--seq-length 131072") == [8, 8, 8, 8]
    assert asked_for(words + "--seq-length 2048 --decoder-first-pipeline-num-layers 8") == [8, 8, 8, 8]


def test_the_user_may_fix_the_ends() -> None:
    assert sizes(10, 4, first=2, last=2) == [2, 3, 3, 2]
    assert sizes(10, 4, last=1) == [3, 3, 3, 1]


@pytest.mark.parametrize("options", [{"first": 3}, {"first": 10}, {"last": 0}, {"first": 5, "last": 6}])
def test_ends_that_leave_no_equal_rest(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_layers=10 over 4"):
        layers_of_stages([LAYER] * 10, 4, **options)


@given(st.integers(1, 12), st.integers(0, 40), st.floats(0, 8))
def test_every_layer_has_one_stage(stages: int, more: int, head: float) -> None:
    split = layers_of_stages([LAYER] * (stages + more), stages, head_cost=round(head * LAYER))
    assert [layer for part in split for layer in part] == list(range(stages + more))
    assert all(split)


@given(st.integers(1, 8), st.integers(1, 4))
def test_every_stage_has_one_rank(pp: int, chunks: int) -> None:
    loop = sorted(stage for rank in range(pp) for stage in stages_of_rank(rank, pp, chunks, v_shape=False))
    v = sorted(stage for rank in range(pp) for stage in stages_of_rank(rank, pp, 2, v_shape=True))
    assert loop == list(range(pp * chunks))
    assert v == list(range(2 * pp))


def test_micro_batches_in_rounds() -> None:
    for good in (1, 3, 4, 7, 8, 16):
        check_micro_batches(good, 4)
    with pytest.raises(ConfigError, match="9 micro-batches"):
        check_micro_batches(9, 4)


def test_a_schedule_in_v_shape_without_a_pipeline_leaves_the_layers_whole() -> None:
    config = load("--num-layers 6 --pipeline-schedule zbv".split()).config
    assert stage_layers(config.model, config.parallel, 64) == [range(6)]
