"""The arithmetic of regions: where a rank's elements lie, what two regions share, and whether some cover a tensor."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.checkpoint import CheckpointError, TensorSlice, global_ranges
from megatron.optimus.checkpoint.slices import (
    Region,
    box_numel,
    check_coverage,
    overlaps,
    range_boxes,
    regions_in_boxes,
)


@st.composite
def local_parameters(draw):
    num_experts = draw(st.integers(1, 6))
    rest = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    ids = draw(st.permutations(range(num_experts)))[: draw(st.integers(1, num_experts))]
    numel = len(ids) * math.prod(rest)
    start = draw(st.integers(0, numel))
    return (num_experts, *rest), list(ids), start, draw(st.integers(start, numel))


@given(local_parameters())
def test_ranges_move_exactly_the_elements_that_indexing_by_expert_gives(case):
    shape, ids, start, stop = case
    whole = torch.arange(math.prod(shape)).view(shape)
    local = whole[ids].flatten()
    ranges = global_ranges(shape, ids, start, stop)
    parts = [whole.flatten()[low:high] for low, high, _ in ranges]
    assert torch.equal(torch.cat(parts) if parts else local[:0], local[start:stop])
    position = start
    for low, high, local_start in ranges:
        assert local_start == position and low < high
        position += high - low
    for before, after in itertools.pairwise(ranges):
        assert before[1] != after[0], "neighbouring ranges must be one"


def test_whole_parameter_is_one_range():
    assert global_ranges((4, 3), None, 2, 7) == [(2, 7, 2)]
    assert global_ranges((4, 3), (0, 1, 2, 3), 2, 7) == [(2, 7, 2)]
    assert global_ranges((4, 3), (1, 3), 1, 6) == [(4, 6, 1), (9, 12, 3)]
    assert global_ranges((), None, 0, 1) == [(0, 1, 0)]
    assert global_ranges((4, 0), (1, 3), 0, 0) == []


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_the_parameter_are_refused(start, stop):
    with pytest.raises(CheckpointError, match="no range of a parameter of 6 elements"):
        global_ranges((4, 3), (0, 2), start, stop)
    with pytest.raises(CheckpointError, match="expert 4 is outside"):
        global_ranges((4, 3), (0, 4), 0, 6)


def test_slice_refuses_what_does_not_fit():
    good = torch.zeros(4)
    TensorSlice("w", "master", (2, 4), 4, 8, good)
    for start, stop, tensor in [
        (5, 9, good),
        (-1, 3, good),
        (0, 3, good),
        (0, 4, good.view(2, 2)),
        (0, 4, torch.zeros(8)[::2]),
    ]:
        with pytest.raises(CheckpointError, match=r"w \(master\)"):
            TensorSlice("w", "master", (2, 4), start, stop, tensor)


def test_a_parameter_made_of_boxes():
    """Columns 0 and 1, then column 4, of a tensor (3, 6)."""
    boxes = [((0, 3), (0, 2)), ((0, 3), (4, 5))]
    assert regions_in_boxes((3, 6), boxes, 4, 8) == [
        (Region((3, 6), 4, 6, boxes[0]), 4),
        (Region((3, 6), 0, 2, boxes[1]), 6),
    ]
    assert regions_in_boxes((3, 6), boxes, 3, 3) == []
    with pytest.raises(CheckpointError, match="no range of a parameter of 9 elements"):
        regions_in_boxes((3, 6), boxes, 4, 10)


def values_at(whole, region):
    """By the plainest indexing there is."""
    box = region.box or tuple((0, size) for size in region.shape)
    return whole[tuple(slice(*interval) for interval in box)].reshape(-1)[region.start : region.stop]


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    box = tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    box = tuple((low, high) for low, high in box)
    if draw(st.booleans()) or any(low == high for low, high in box):
        box = None
    numel = torch.zeros(shape).numel() if box is None else box_numel(box)
    start = draw(st.integers(0, numel))
    return Region(shape, start, draw(st.integers(start, numel)), box)


@given(regions(), st.data())
def test_overlaps_are_the_common_elements(first, data):
    second = data.draw(
        regions().filter(lambda region: region.shape == first.shape) if first.shape == () else _like(first)
    )
    whole = torch.arange(torch.zeros(first.shape).numel()).view(first.shape)
    a, b = values_at(whole, first), values_at(whole, second)
    found = torch.full_like(b, -1)
    for overlap in overlaps(first, second):
        assert overlap.numel == overlap.in_first(a).numel()
        overlap.in_second(found).copy_(overlap.in_first(a))
    expected = torch.where(torch.isin(b, a), b, -1)
    assert torch.equal(found, expected)
    parts = [whole[tuple(slice(*i) for i in box)].reshape(-1) for box in first.boxes()]
    assert torch.equal(torch.cat(parts) if parts else a[:0], a)
    assert len(range_boxes(first.shape, 0, whole.numel())) == 1


@st.composite
def _like(draw, first):
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in first.shape)
    if draw(st.booleans()) or any(low == high for low, high in box):
        box = None
    numel = torch.zeros(first.shape).numel() if box is None else box_numel(box)
    start = draw(st.integers(0, numel))
    return Region(first.shape, start, draw(st.integers(start, numel)), box)


@settings(max_examples=200)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from(["nothing", "drop", "double", "shift"]))
def test_coverage_is_checked_exactly(seed, cuts, damage):
    """A tensor cut at random into boxes is accepted; one box less, more or moved is not."""
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (), generator=generator))

    shape = (4, 5, 3)
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(cuts):
        box = boxes.pop(draw(len(boxes)))
        dim = draw(3)
        low, high = box[dim]
        middle = low + draw(high - low + 1)
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in ((low, middle), (middle, high)) if part[0] < part[1]]
    wrong = boxes[draw(len(boxes))]
    if damage == "drop":
        boxes.remove(wrong)
    elif damage == "double":
        boxes.append(wrong)
    elif damage == "shift":
        moved = tuple((max(0, a - 1), b) for a, b in wrong)
        if moved == wrong:
            return
        boxes[boxes.index(wrong)] = moved
    pieces = [Region(shape, 0, box_numel(box), box) for box in boxes]
    if damage == "nothing":
        check_coverage("w", shape, pieces)
    else:
        with pytest.raises(CheckpointError, match=r"covered twice|missing"):
            check_coverage("w", shape, pieces)


def test_a_hostile_placement_does_not_keep_the_reader_busy():
    """Boxes that no straight cut separates, and thousands that lie on each other."""
    wheel = [((0, 2), (0, 1)), ((2, 3), (0, 2)), ((1, 3), (2, 3)), ((0, 1), (1, 3)), ((1, 2), (1, 2))]
    check_coverage("w", (3, 3), [Region((3, 3), 0, box_numel(box), box) for box in wheel])
    many = [((i, i + 500), (500 - i, 1000 - i)) for i in range(500)]
    with pytest.raises(CheckpointError, match=r"too irregular|covered twice"):
        check_coverage("w", (1000, 1000), [Region((1000, 1000), 0, box_numel(box), box) for box in many * 4])


def test_a_scalar_is_covered_once():
    one = Region((), 0, 1, ())
    check_coverage("w", (), [one])
    for pieces, problem in (([], "missing"), ([one, one], "covered twice")):
        with pytest.raises(CheckpointError, match=problem):
            check_coverage("w", (), pieces)
