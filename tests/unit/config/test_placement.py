"""Placements of experts: the rule that balances them, and the file."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.placement import (
    LayerPlacement,
    balanced_placement,
    busiest_over_mean,
    from_json,
    regular_placement,
    to_json,
)
from megatron.optimus.config.schema import ConfigError, ExpertPlacement


def best_there_is(load_E: list[int], num_ranks: int) -> float:
    """Every placement, by brute force."""
    per_rank = len(load_E) // num_ranks
    cuts = [slice(rank * per_rank, (rank + 1) * per_rank) for rank in range(num_ranks)]
    every = itertools.permutations(range(len(load_E)))
    return min(busiest_over_mean(load_E, tuple(order[cut] for cut in cuts)) for order in every)


def assert_whole(placement: LayerPlacement, num_experts: int, num_ranks: int) -> None:
    assert {len(experts) for experts in placement} == {num_experts // num_ranks} and len(placement) == num_ranks
    assert sorted(expert for experts in placement for expert in experts) == list(range(num_experts))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_balanced_is_close_to_the_best_there_is(load_E: list[int], num_ranks: int) -> None:
    placement = balanced_placement(load_E, num_ranks)
    assert_whole(placement, 6, num_ranks)
    found, best = busiest_over_mean(load_E, placement), best_there_is(load_E, num_ranks)
    assert best <= found + 1e-12 and found <= 4 / 3 * best + 1e-12
    for regular in ExpertPlacement:
        assert_whole(regular_placement(6, num_ranks, regular), 6, num_ranks)


def test_exchanges_repair_what_the_rule_alone_leaves() -> None:
    load_E = [3, 3, 2, 2, 2, 0]  # the rule alone: 3+2+2 and 3+2+0
    assert busiest_over_mean(load_E, balanced_placement(load_E, 2)) == 1
    assert busiest_over_mean([0, 0, 0, 0], balanced_placement([0, 0, 0, 0], 2)) == 1


SIZES = dict(num_layers=2, num_experts=4, num_ranks=2)


def test_a_file_and_back() -> None:
    layers = (((0, 3), (1, 2)), ((2, 0), (3, 1)))
    assert from_json(to_json(layers), "p.json", **SIZES) == layers


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([[[0, 3], [1, 2]]], "it has 1 layers"),
        ([[[0, 3], [1, 2]], [[0, 1, 2], [3]]], r"layer 1 has 2 ranks with \[1, 3\] experts"),
        ([[[0, 3], [1, 2]], [[0], [1], [2], [3]]], "layer 1 has 4 ranks"),
        ([[[0, 3], [1, 3]], [[0, 1], [2, 3]]], "layer 0 does not have every expert once"),
        ([[0, 3], [1, 2]], "TypeError"),
        ("none", "ValueError"),
    ],
)
def test_a_file_of_another_model_is_refused(layers: object, what: str) -> None:
    text = json.dumps({"experts_of_ranks_of_layers": layers})
    with pytest.raises(ConfigError, match=rf"p\.json must hold 2 layers of 2 ranks with 2 of 4 experts each.*{what}"):
        from_json(text, "p.json", **SIZES)
    with pytest.raises(ConfigError, match="KeyError"):
        from_json("{}", "p.json", **SIZES)
