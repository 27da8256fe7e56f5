"""Draws curves and bars as text: braille dots, two wide and four high in a character, and blocks."""

from __future__ import annotations

import math

import numpy as np

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 4) -> str:
    """A number of a few significant digits in at most eight characters: 12.34, 1.234M, 4e-04; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.{max(0, digits - 3)}e}"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def column_means(x: np.ndarray, y: np.ndarray, num_columns: int) -> np.ndarray:
    """The mean of ``y`` in equally wide columns of ``x``; NaN in a column without a value."""
    is_there = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_there], y[is_there]
    if not len(x):
        return np.full(num_columns, math.nan)
    width = (x[-1] - x[0]) / num_columns or 1.0
    column = np.minimum(((x - x[0]) / width).astype(np.int64), num_columns - 1)
    sums, counts = (np.bincount(column, weights, num_columns) for weights in (y, None))
    return np.divide(sums, counts, out=np.full(num_columns, math.nan), where=counts > 0)


def curve(x: np.ndarray, y: np.ndarray, width: int, height: int) -> list[str]:
    """A curve with a scale at its left and the ends of ``x`` below it.

    Args:
        x: ascending, such as steps.
        y: the values; NaN where there is none.
        width: characters of a line.
        height: lines.

    Returns:
        The lines, each of ``width`` characters.
    """
    label, rows = 8, height - 1
    columns = max(1, width - label - 1)
    means = column_means(x, y, 2 * columns)
    there = np.flatnonzero(np.isfinite(means))
    if not len(there) or rows < 1:
        return ["nothing to draw yet".center(width)[:width], *[" " * width] * (height - 1)]
    low, high = float(means[there].min()), float(means[there].max())
    if high - low <= 1e-9 * abs(high):
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    filled = np.interp(np.arange(there[0], there[-1] + 1), there, means[there])
    level = np.rint((high - filled) / (high - low) * (4 * rows - 1)).astype(np.int64)  # from the top, in dots
    cells = np.zeros((rows, columns), np.int64)
    before = level[0]
    for column, now in enumerate(level, start=int(there[0])):
        for dot in range(min(before, now), max(before, now) + 1):
            cells[dot // 4, column // 2] |= _DOTS[dot % 4][column % 2]
        before = now
    labels = {0: number(high), rows - 1: number(low)} | ({rows // 2: number((high + low) / 2)} if rows > 4 else {})
    lines = [
        f"{labels.get(row, ''):>{label}} " + "".join(chr(0x2800 + cell) if cell else " " for cell in cells[row])
        for row in range(rows)
    ]
    ends = f"{x[0]:,.0f}", f"{x[-1]:,.0f}"
    below = " " * (label + 1) + ends[0] + ends[1].rjust(columns - len(ends[0]))
    return [line[:width].ljust(width) for line in [*lines, below]]


def sparkline(values: np.ndarray, width: int) -> str:
    """The last values as a line of blocks, "" where there are none."""
    means = column_means(np.arange(len(values)), values, width) if len(values) > width else values
    low, high = (np.nanmin(means), np.nanmax(means)) if np.isfinite(means).any() else (0.0, 0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in means.tolist())


def load_blocks(load_E: np.ndarray, width: int) -> list[tuple[str, float]]:
    """A block for each expert, or for the busiest of neighbours where there are more than ``width``.

    Args:
        load_E: multiples of the mean.

    Returns:
        The block, whose half height is the mean, and the multiple.
    """
    groups = np.array_split(load_E, min(width, len(load_E)))
    busiest = [float(group.max()) for group in groups]
    return [(_BLOCKS[min(len(_BLOCKS) - 1, int(value * len(_BLOCKS) / 2))], value) for value in busiest]
