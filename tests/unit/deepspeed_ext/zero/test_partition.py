"""Ownership: every element exactly one owner, small padding, for any parameters, bucket and group size."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zero.partition import ALIGNMENT, flat_layout, launch_order
from megatron.optimus.config.presets import PRESETS
from megatron.optimus.config.schema import ModelConfig
from megatron.optimus.models.decoder import Decoder

NUMELS = st.lists(st.integers(0, 5000) | st.sampled_from([1, 255, 256, 257, 4096]), max_size=20)
BUCKETS = st.integers(1, 40_000)


@settings(max_examples=150, deadline=None)
@given(numels=NUMELS, group_size=st.integers(1, 17), bucket_numel=BUCKETS)
def test_every_element_has_exactly_one_owner(numels: list[int], group_size: int, bucket_numel: int) -> None:
    layout = flat_layout([(f"p{i}", n) for i, n in enumerate(numels)], group_size, bucket_numel)
    owned: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for bucket in layout.buckets:
        assert bucket.start == start, "buckets must follow each other"
        start += bucket.numel
        for rank in range(group_size):
            end = 0
            for part in bucket.shard_ranges(rank):
                assert part.start < part.stop and part.offset >= end, "parts must not overlap in the shard"
                end = part.offset + part.stop - part.start
                assert end <= bucket.shard_numel
                whole = next(p for p in bucket.ranges if p.name == part.name)
                assert rank * bucket.shard_numel + part.offset - whole.offset == part.start - whole.start
                owned.setdefault(part.name, []).append((part.start, part.stop))
    assert start == layout.numel
    for i, numel in enumerate(numels):
        position = 0
        for first, stop in owned.get(f"p{i}", []):
            assert first == position
            position = stop
        assert position == numel


@settings(max_examples=150, deadline=None)
@given(numels=NUMELS, group_size=st.integers(1, 4096), bucket_numel=BUCKETS)
def test_padding_alignment_and_bucket_size(numels: list[int], group_size: int, bucket_numel: int) -> None:
    layout = flat_layout([(f"p{i}", n) for i, n in enumerate(numels)], group_size, bucket_numel)
    unit = group_size * ALIGNMENT
    assert 0 <= layout.padding <= ALIGNMENT * len(numels) + unit
    for bucket in layout.buckets:
        assert bucket.shard_numel % ALIGNMENT == 0
        assert bucket.numel <= max(bucket_numel + unit - 1, unit)
        covered = sum(p.stop - p.start for p in bucket.ranges) + sum(stop - start for start, stop in bucket.gaps())
        assert covered == bucket.numel
        for part in bucket.ranges:
            assert part.offset % ALIGNMENT == 0 and part.start % ALIGNMENT == 0


def test_a_layout_without_parameters() -> None:
    layout = flat_layout([], 4, 100)
    assert layout.numel == 4 * ALIGNMENT == layout.padding and layout.shard_numel == ALIGNMENT


@pytest.mark.parametrize(
    ("params", "group_size", "bucket_numel", "message"),
    [
        ([("a", 1), ("a", 1)], 1, 1, "occurs twice"),
        ([("a", -1)], 1, 1, "negative"),
        ([], 0, 1, "group_size=0"),
        ([], 1, 0, "bucket_numel=0"),
    ],
)
def test_bad_layouts(params: list[tuple[str, int]], group_size: int, bucket_numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flat_layout(params, group_size, bucket_numel)
    with pytest.raises(ValueError, match="rank=1"):
        flat_layout([], 1, 1).buckets[0].shard_ranges(1)


def test_buckets_are_launched_as_backward_completes_them() -> None:
    """A bucket is complete when the earliest parameter of forward has its gradient."""
    assert launch_order([[0, 9], [5, 6], [7, 8], [1, 2]]) == [2, 1, 3, 0]


def _parameters(config: ModelConfig) -> list[tuple[str, int, bool]]:
    """(name, elements, is an expert's) of a preset's parameters."""
    with torch.device("meta"):
        model = Decoder(config)
    return [(name, p.numel(), ".experts." in name) for name, p in model.named_parameters()]


@pytest.mark.parametrize(
    ("preset", "stages", "dense_ranks", "expert_parallel"),
    [
        ("mula-1b", 1, 8, 1),
        ("mula-7b-a1b", 1, 8, 1),
        ("mula-7b-a1b", 1, 3072, 1),
        ("mula-20b-a2b", 1, 3072, 12),
        ("mula-100b-a7b", 4, 768, 12),
        ("mula-220b-a10b", 8, 1536, 12),
    ],
)
def test_padding_is_below_a_thousandth_at_real_sizes(
    preset: str, stages: int, dense_ranks: int, expert_parallel: int
) -> None:
    """One pipeline stage's share of the layers; a flat buffer pads its end only."""
    model = ModelConfig(**PRESETS[preset]["model"])
    layers = model.num_layers // stages
    params = [p for p in _parameters(model) if not p[0].startswith("layers.") or int(p[0].split(".")[1]) < layers]
    padding = total = 0
    for experts in (False, True):
        ranks = dense_ranks // expert_parallel if experts else dense_ranks
        share = expert_parallel if experts else 1
        members = [(name, numel // share) for name, numel, is_expert in params if is_expert is experts]
        if members:
            layout = flat_layout(members, ranks, 1 << 26)
            padding, total = padding + layout.padding, total + layout.numel
    assert padding / total < 1e-3, (padding, total)


def test_mula_220b_over_12288_ranks_is_planned_within_a_second() -> None:
    params = [(f"layers.{i}.{j}", 3072 * 3072) for i in range(72) for j in range(12)]
    began = time.perf_counter()
    layout = flat_layout(params, 12_288, 1 << 26)
    parts = [bucket.shard_ranges(rank) for rank in (0, 6_000, 12_287) for bucket in layout.buckets]
    assert time.perf_counter() - began < 1.0
    assert layout.padding / layout.numel < 1e-3 and any(parts)
