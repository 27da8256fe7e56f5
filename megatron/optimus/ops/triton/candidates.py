"""Lists the candidate tiles of each kernel of the expert layer, and makes a table entry of what tuning has found.

Which candidate runs is decided in tiles.py; tile_cache.py keeps entries on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Tiles(NamedTuple):
    """One way to launch a kernel. Kernels that move rows have no depth and no stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    programs: int  # per multiprocessor

    def __str__(self) -> str:
        shape = "x".join(str(n) for n in self[:3] if n)
        stages = f", {self.stages} stages, {self.programs} a multiprocessor" if self.depth else ""
        return f"{shape}, {self.warps} warps{stages}"


# The first of each is fastest on an H200 (docs/design/expert_kernels.md); the first that fits is a device's default.
_PRODUCT = (
    Tiles(128, 256, 64, 8, 3, 1),
    Tiles(128, 256, 32, 8, 4, 1),
    Tiles(128, 128, 64, 8, 4, 1),
    Tiles(128, 128, 64, 4, 3, 1),
    Tiles(128, 128, 64, 4, 3, 2),
    Tiles(128, 128, 32, 4, 4, 2),
    Tiles(64, 256, 64, 4, 3, 1),
    Tiles(64, 128, 64, 4, 4, 2),
    Tiles(128, 64, 64, 4, 3, 2),
    Tiles(64, 128, 32, 4, 3, 2),
    Tiles(64, 64, 32, 4, 3, 2),
)
CANDIDATES: dict[str, tuple[Tiles, ...]] = {
    "up_swiglu": (  # cols of gate and as many of up
        Tiles(128, 128, 64, 8, 4, 1),
        Tiles(128, 128, 64, 8, 3, 1),
        Tiles(128, 128, 32, 8, 4, 1),
        Tiles(128, 64, 64, 8, 4, 1),
        Tiles(128, 64, 64, 4, 3, 1),
        Tiles(128, 64, 64, 4, 3, 2),
        Tiles(128, 64, 32, 4, 4, 2),
        Tiles(64, 128, 64, 4, 3, 1),
        Tiles(64, 64, 64, 4, 4, 2),
        Tiles(64, 64, 32, 4, 3, 2),
        Tiles(64, 32, 32, 4, 3, 2),
    ),
    "rows_times_weight_t": _PRODUCT,  # by weight[e].T
    "rows_times_weight": _PRODUCT,
    "weight_gradient": _PRODUCT,
    "weight_gradient_add": _PRODUCT,  # to a main gradient in 16 bits
    "weight_gradient_add_fp32": _PRODUCT,
    "spread_rows": (  # cols at a time, at most
        Tiles(1, 2048, 0, 8, 1, 1),
        Tiles(1, 2048, 0, 4, 1, 1),
        Tiles(1, 1024, 0, 8, 1, 1),
        Tiles(1, 1024, 0, 4, 1, 1),
        Tiles(1, 4096, 0, 8, 1, 1),
    ),
    "sum_rows": (
        Tiles(1, 2048, 0, 4, 1, 1),
        Tiles(1, 2048, 0, 8, 1, 1),
        Tiles(1, 1024, 0, 4, 1, 1),
        Tiles(1, 1024, 0, 2, 1, 1),
        Tiles(1, 512, 0, 2, 1, 1),
    ),
    "swiglu_backward": (
        Tiles(2, 1024, 0, 8, 1, 1),
        Tiles(2, 1024, 0, 4, 1, 1),
        Tiles(1, 1024, 0, 4, 1, 1),
        Tiles(4, 512, 0, 8, 1, 1),
        Tiles(4, 256, 0, 4, 1, 1),
    ),
}


class Entry(NamedTuple):
    """The outcome of tuning one problem."""

    tiles: Tiles
    microseconds: float
    default_microseconds: float
    matches_default_bits: bool  # gave the default's very bits


Table = Mapping[str, Entry]  # by str(problem), of one device


def as_record(entry: Entry) -> dict[str, Any]:
    """Converts an entry to JSON types."""
    tiles, microseconds, default, exact = entry
    times = {"microseconds": microseconds, "default_microseconds": default}
    return {"tiles": tiles._asdict(), **times, "is_exact": exact}


def of_record(record: Any) -> Entry:
    """Inverts ``as_record``, without checking that the tiles are legal. Raises ValueError for anything else."""
    try:
        tiles, times = record["tiles"], (record["microseconds"], record["default_microseconds"])
        values = [tiles[name] for name in Tiles._fields]
        whole = all(type(value) is int for value in values)
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in times)
    except (TypeError, KeyError, OverflowError) as error:  # the last: an integer beyond all floats
        raise ValueError(f"not an entry of tuned tiles: {record!r}") from error
    if not (whole and numbers and type(record.get("is_exact")) is bool):
        raise ValueError(f"not an entry of tuned tiles: {record!r}")
    return Entry(Tiles(*values), *times, record["is_exact"])
