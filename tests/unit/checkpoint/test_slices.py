import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimus.checkpoint import CheckpointError, TensorSlice, global_ranges


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
