"""Values that several options share: lists in words, divisors, and shares of a split."""

from megatron.optimus.config.schema import DataConfig
from megatron.optimus.config.values import divisors, one_of, parse_split


def test_split_shares() -> None:
    assert [float(share) for share in parse_split(DataConfig().split)] == [0.969, 0.03, 0.001]
    assert parse_split("3, 1") == (0.75, 0.25, 0.0)
    assert parse_split("100") == (1.0, 0.0, 0.0)


def test_one_of() -> None:
    assert [one_of([1]), one_of([1, 2]), one_of([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_divisors_of_any_number_are_found_at_once():
    for number in (-1, *range(300)):
        assert divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    assert divisors(10**12 + 39) == [1, 10**12 + 39]
    assert divisors(2**62)[-1] == 2**62
