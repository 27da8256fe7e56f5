"""Candidates of tiles: what the kernels assume of them, and their records."""

from __future__ import annotations

import json

import pytest

from megatron.optimus.ops.triton.candidates import CANDIDATES, Entry, as_record, of_record
from megatron.optimus.ops.triton.tiles import (
    ROW_TILE,
)


def test_candidates_keep_to_what_the_kernels_assume() -> None:
    for kernel, candidates in CANDIDATES.items():
        assert len(set(candidates)) == len(candidates)
        for rows, cols, depth, warps, stages, programs in candidates:
            assert ROW_TILE % rows == 0, "tiles of one expert"
            assert depth == 0 or (ROW_TILE % depth == 0 and depth >= 16), "a weight gradient stays in its expert's rows"
            assert cols & (cols - 1) == 0 and warps in (2, 4, 8) and stages >= 1 and programs >= 1
            assert kernel == "up_swiglu" or depth == 0 or cols % 4 == 0


@pytest.mark.parametrize("kernel", CANDIDATES)
def test_a_record_is_read_as_it_was_written(kernel: str) -> None:
    for tiles in CANDIDATES[kernel]:
        entry = Entry(tiles, 10.0, 12.5, matches_default_bits=False)
        assert of_record(json.loads(json.dumps(as_record(entry)))) == entry


def test_what_is_no_record_is_refused() -> None:
    good = as_record(Entry(CANDIDATES["up_swiglu"][0], 10.0, 12.5, matches_default_bits=True))
    for bad in (None, [], {}, good | {"microseconds": "1"}, good | {"is_exact": 1}, good | {"tiles": {"rows": 64}}):
        with pytest.raises(ValueError):
            of_record(bad)
