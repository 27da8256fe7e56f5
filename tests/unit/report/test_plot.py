"""Curves as text: where the dots are, and what cannot be drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron.optimus.report import plot


def heights(lines: list[str]) -> list[float]:
    """The mean height of the dots in each column of characters, from the top, in dots."""
    found = []
    for cell in zip(*(line[9:] for line in lines[:-1]), strict=True):
        rows = [4 * row + dot for row, char in enumerate(cell) for dot, bits in enumerate((9, 18, 36, 192))
                if char != " " and (ord(char) - 0x2800) & bits]  # fmt: skip
        found.append(sum(rows) / len(rows) if rows else math.nan)
    return found


def test_a_falling_line_falls_from_the_upper_left_to_the_lower_right() -> None:
    x = np.arange(1.0, 1001.0)
    lines = plot.curve(x, 10 - x / 100, 40, 9)
    assert len(lines) == 9 and {len(line) for line in lines} == {40}
    found = heights(lines)
    assert found[0] <= 1 and found[-1] >= 30 and found == sorted(found)
    assert lines[0].startswith("    9.91 ") and lines[7].startswith("    0.08 ") and lines[8].split() == ["1", "1,000"]


def test_gaps_are_bridged_and_a_constant_is_in_the_middle() -> None:
    y = np.full(50, math.nan)
    y[[0, 25, 49]] = 3.0
    found = heights(plot.curve(np.arange(50.0), y, 30, 6))
    assert not any(map(math.isnan, found)) and set(found) == {10.0}
    assert "nothing to draw" in plot.curve(np.arange(3.0), np.full(3, math.nan), 30, 6)[0]
    for width, height in ((1, 1), (9, 2), (3, 5)):
        assert len(plot.curve(np.arange(9.0), np.arange(9.0), width, height)) == height


def test_blocks() -> None:
    assert plot.sparkline(np.array([0.0, 1.0, math.nan, 7.0]), 8) == "▁▂ █" and plot.sparkline(np.zeros(0), 8) == ""
    assert plot.sparkline(np.arange(800.0), 8) == "▁▂▃▄▅▆▇█"
    assert plot.load_blocks(np.array([0.0, 1.0, 3.0]), 9) == [("▁", 0.0), ("▅", 1.0), ("█", 3.0)]
    assert [value for _, value in plot.load_blocks(np.arange(8.0), 2)] == [3.0, 7.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "-"), (0.0, "0"), (2.34567, "2.346"), (4e-4, "4.0e-04"), (628_800, "628.8k"),
     (2.0971e9, "2.097B"), (9999, "9999"), (-12.5, "-12.5"), (1e18, "1.0e+18")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert plot.number(value) == text
