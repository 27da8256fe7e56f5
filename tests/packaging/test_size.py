"""The size of the package is a decision: it changes by more than a little only together with the number here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.dev.outline import read_sources, total_lines

ROOT = Path(__file__).resolve().parents[2]

# Lines of the Python files of megatron and deepspeed_ext, docstrings and comments included. A change that brings a
# capability raises it in the same commit; one that removes code lowers it.
TOTAL_LINES = 70_184
TOLERANCE = 0.02


def test_the_package_has_the_size_it_is_said_to_have(record_property: Callable[[str, object], None]) -> None:
    total = total_lines(read_sources(ROOT))
    print(f"megatron + deepspeed_ext: {total:,} lines")
    record_property("total_lines", total)
    assert abs(total - TOTAL_LINES) <= TOLERANCE * TOTAL_LINES, (
        f"megatron + deepspeed_ext have {total:,} lines, TOTAL_LINES={TOTAL_LINES:,} allows {TOLERANCE:.0%} more or "
        "less: if the change is meant, set TOTAL_LINES to what there is now"
    )
