"""Ownership: every element exactly one owner, small padding, for any parameters and group size."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zero.partition import ALIGNMENT, ParamSpec, flat_layout, plan_families, shard_pieces

NUMELS = st.lists(st.integers(0, 5000) | st.sampled_from([1, 63, 64, 65, 4096]), max_size=20)


@settings(max_examples=150, deadline=None)
@given(numels=NUMELS, group_size=st.integers(1, 17))
def test_every_element_has_exactly_one_owner(numels: list[int], group_size: int) -> None:
    layout = flat_layout([(f"p{i}", n) for i, n in enumerate(numels)], group_size)
    owned: dict[str, list[tuple[int, int]]] = {}
    for rank in range(group_size):
        end = 0
        for piece in shard_pieces(layout, rank):
            assert piece.start < piece.stop and piece.offset >= end, "pieces must not overlap in the shard"
            end = piece.offset + piece.stop - piece.start
            assert end <= layout.shard_numel
            offset = next(p.offset for p in layout.placements if p.name == piece.name)
            assert rank * layout.shard_numel + piece.offset == offset + piece.start, "shard and buffer must agree"
            owned.setdefault(piece.name, []).append((piece.start, piece.stop))
    for i, numel in enumerate(numels):
        position = 0
        for start, stop in owned.get(f"p{i}", []):
            assert start == position
            position = stop
        assert position == numel


@settings(max_examples=150, deadline=None)
@given(numels=NUMELS, group_size=st.integers(1, 4096))
def test_padding_and_alignment(numels: list[int], group_size: int) -> None:
    layout = flat_layout([(f"p{i}", n) for i, n in enumerate(numels)], group_size)
    assert layout.numel == group_size * layout.shard_numel and layout.shard_numel % ALIGNMENT == 0
    assert all(placement.offset % ALIGNMENT == 0 for placement in layout.placements)
    assert 0 <= layout.padding <= ALIGNMENT * (len(numels) + group_size)


def test_families_are_separate_and_ordered() -> None:
    specs = [ParamSpec("a", 5, "dense"), ParamSpec("x", 70, "expert"), ParamSpec("b", 3, "dense")]
    layouts = plan_families(specs, {"dense": 4, "expert": 1})
    assert list(layouts) == ["dense", "expert"]
    assert [(p.name, p.offset) for p in layouts["dense"].placements] == [("a", 0), ("b", ALIGNMENT)]
    assert layouts["expert"].numel == 2 * ALIGNMENT


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([ParamSpec("a", 1, "f"), ParamSpec("a", 1, "g")], "families 'f' and 'g'"),
        ([ParamSpec("a", 1, "unknown")], "no process group"),
        ([ParamSpec("a", -1, "f")], "negative"),
    ],
)
def test_bad_parameters(specs: list[ParamSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_families(specs, {"f": 1, "g": 1})


def test_a_layout_for_thousands_of_ranks_is_quick_and_tight() -> None:
    params = [(f"layers.{i}.{j}", 3072 * 3072) for i in range(72) for j in range(12)]
    began = time.perf_counter()
    layout = flat_layout(params, 12_288)
    pieces = [shard_pieces(layout, rank) for rank in (0, 6_000, 12_287)]
    assert time.perf_counter() - began < 1.0
    assert layout.padding / layout.numel < 1e-3 and all(pieces)
