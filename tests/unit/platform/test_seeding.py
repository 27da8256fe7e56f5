"""Named generators, and the seed of every other generator."""

import random

import numpy as np
import torch

from megatron.optimus.platform.seeding import generator_for, seed_all


def draw(seed: int, *names: str | int) -> list[float]:
    return torch.randn(4, generator=generator_for(seed, *names)).tolist()


def test_equal_names_give_equal_numbers_whatever_was_drawn_before() -> None:
    first = draw(1, "layers.0.moe.experts.down_weight", 3)
    torch.manual_seed(0)
    draw(1, "something else")
    assert draw(1, "layers.0.moe.experts.down_weight", 3) == first


def test_seed_and_every_name_count() -> None:
    variants = [(1,), (2,), (1, "a"), (1, "b"), (1, "a", 0), (1, "a", 1), (1, "a0"), (1, "a", "0"), (2**63, "a")]
    assert len({tuple(draw(*variant)) for variant in variants}) == len(variants)  # type: ignore[arg-type]


def test_the_numbers_stay_the_same_over_versions() -> None:
    # Saved runs depend on it: a changed hash would change every model trained from a given seed.
    assert generator_for(1234, "embedding.weight").initial_seed() == 3362470601


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    draw(1, "x")
    assert torch.equal(torch.rand(3), expected)


def test_seed_all() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_all(2**40 + 3)
    first = draws()
    assert draws() != first
    seed_all(2**40 + 3)
    assert draws() == first
