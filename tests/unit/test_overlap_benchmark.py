"""What benchmarks/overlap.py says of systems whose first steps differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from overlap_systems import first_step_differs


def _result(system: str, loss: float, norm: float) -> dict[str, Any]:
    return {"system": system, "first_loss": loss, "first_grad_norm": norm}


@pytest.mark.parametrize(
    ("last", "dtype", "named"),
    [
        (_result("so", 8.0, 2.0), "fp32", []),
        (_result("so", 8.0, 2.0001), "fp32", ["first_grad_norm of so is 2.0001, of ours 2.0: more apart than 1e-05"]),
        (_result("so", 8.0, 2.0001), "bf16", []),
        (_result("so", 8.1, float("nan")), "bf16", ["first_loss of so is 8.1", "first_grad_norm of so is nan"]),
        (_result("nudged", 9.0, 9.0), "bf16", []),
        ({"system": "so", "error": "out of memory"}, "bf16", []),
    ],
)
def test_a_line_for_each_number_that_is_further_apart_than_rounding(
    last: dict[str, Any], dtype: str, named: list[str]
) -> None:
    lines = first_step_differs([_result("ours", 8.0, 2.0), _result("plain", 0.0, 0.0), last], dtype)
    assert len(lines) == len(named) and all(line.startswith(name) for line, name in zip(lines, named, strict=True))
    assert first_step_differs([last], dtype) == []
