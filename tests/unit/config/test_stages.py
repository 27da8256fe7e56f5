"""Layers of pipeline stages."""

from __future__ import annotations

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
