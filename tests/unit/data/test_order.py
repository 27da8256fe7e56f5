"""The computed order: a bijection, uniform, and the same in both forms on every machine."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.data.order import epoch_key, permute, permute_many, sample_at, samples_at

SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 97, 127, 128, 255, 256, 257, 1000, 1024, 4099, 65537]


@pytest.mark.parametrize("n", SIZES)
def test_bijection_and_equal_forms(n: int) -> None:
    for key in (0, 1, 2**64 - 1, epoch_key(1234, 0)):
        many = permute_many(np.arange(n), n, key)
        assert sorted(many.tolist()) == list(range(n))
        some = range(n) if n < 300 else range(0, n, n // 50)
        assert [permute(i, n, key) for i in some] == many[list(some)].tolist()


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_forms_are_equal_and_injective_for_any_size(n: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8, unique=True))
    images = permute_many(indices, n, key)
    assert images.tolist() == [permute(i, n, key) for i in indices]
    assert len(set(images.tolist())) == len(indices)
    assert images.min() >= 0 and images.max() < n


def test_order_is_pinned() -> None:
    """A change of these numbers changes the data order of every run that resumes."""
    assert permute_many(np.arange(8), 1000, 1234).tolist() == [549, 736, 305, 567, 337, 476, 448, 513]
    assert [sample_at(p, 5, 7) for p in range(4, 7)] == [(0, 2), (1, 1), (1, 0)]


def test_arguments_out_of_range() -> None:
    for call in (
        lambda: permute(5, 5, 0),
        lambda: permute(-1, 5, 0),
        lambda: permute(0, 0, 0),
        lambda: permute(0, 2**62 + 1, 0),
        lambda: permute_many([0, 5], 5, 0),
        lambda: permute_many([-1], 5, 0),
        lambda: sample_at(-1, 5, 0),
        lambda: samples_at(-1, 2, 5, 0),
    ):
        with pytest.raises(ValueError, match="must"):
            call()


def chi_square_z(counts: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic of equally likely cells is off its mean."""
    expected = counts.mean()
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_a_small_set_are_equally_likely(n: int) -> None:
    orders = Counter(tuple(permute_many(np.arange(n), n, epoch_key(7, epoch)).tolist()) for epoch in range(2400))
    counts = np.zeros(math.factorial(n))
    counts[: len(orders)] = list(orders.values())
    assert abs(chi_square_z(counts)) < 4


def test_positions_are_uniform_within_and_across_epochs() -> None:
    n, epochs, cells = 600, 400, 20
    images = np.stack([permute_many(np.arange(n), n, epoch_key(3, epoch)) for epoch in range(epochs)])
    # where a given sample lands, over epochs
    landed = (images[:, :30] * cells // n).ravel() + cells * np.tile(np.arange(30), epochs)
    assert abs(chi_square_z(np.bincount(landed, minlength=30 * cells))) < 4
    # neighbours stay neighbours no more often than chance: 2 (n-1) of the n (n-1) ordered pairs
    adjacent = (np.abs(np.diff(images, axis=1)) == 1).mean()
    assert abs(adjacent - 2 / n) < 4 * math.sqrt(2 / n / (epochs * n))
    # no memory from one epoch to the next
    fixed = (images[1:] == images[:-1]).mean()
    assert abs(fixed - 1 / n) < 4 * math.sqrt(1 / n / (epochs * n))


def test_each_epoch_covers_everything_in_another_order() -> None:
    n = 101
    samples = [sample_at(p, n, 5) for p in range(3 * n)]
    assert [epoch for epoch, _ in samples] == [0] * n + [1] * n + [2] * n
    orders = [[i for e, i in samples if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != [sample_at(p, n, 6)[1] for p in range(n)]


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 10**6), count=st.integers(0, 40), n=st.integers(1, 30), seed=st.integers(-5, 2**40))
def test_ranges_equal_single_samples(start: int, count: int, n: int, seed: int) -> None:
    expected = [sample_at(p, n, seed)[1] for p in range(start, start + count)]
    assert samples_at(start, count, n, seed).tolist() == expected
