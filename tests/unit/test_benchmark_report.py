"""The report of benchmarks/moe_layer.py over several runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "moe_layer_report.py"
_SPEC = importlib.util.spec_from_file_location("moe_layer_report", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
report = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(report)


def row(implementation: str, milliseconds: float, tokens: int = 8192, zipf: float = 0.0) -> dict[str, Any]:
    speed = 5000 / milliseconds
    return {
        "shape": "mula-7b", "tokens": tokens, "zipf": zipf, "implementation": implementation,
        "forward_backward_ms": milliseconds, "forward_backward_tflops": speed,
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], device: str = "H200") -> Path:
    path.write_text(json.dumps({"device": device, "torch": "2.11", "measurements": rows}))
    return path


def test_a_cell_comes_whole_from_the_last_file_that_has_it(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", [row("optimus", 10), row("peer", 5), row("optimus", 20, 16384)])
    second = write(tmp_path / "b.json", [row("optimus", 8)])
    rows = report.merge([first, second])["measurements"]
    assert [(r["implementation"], r["tokens"], r["forward_backward_ms"]) for r in rows] == [
        ("optimus", 8192, 8),
        ("optimus", 16384, 20),
    ]


def test_machines_are_not_mixed(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{device}.json", [row("optimus", 1)], device) for device in ("H100", "H200")]
    with pytest.raises(ValueError, match="different machines"):
        report.merge(paths)


def test_ratios_are_geometric_means_over_even_cells(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("optimus-triton", 10), row("peer", 20), row("optimus-triton", 10, 16384), row("peer", 5, 16384)]
    report.print_table([*rows, row("optimus-triton", 12.5, zipf=1.0)])
    out = capsys.readouterr().out
    assert "optimus-triton against peer: 1.000x, 0.500 to 2.000, 2 cells" in out
    assert "optimus-triton, mula-7b, 8192 tokens: zipf 1.0 loses 20.0%" in out


def test_ratios_while_others_hold_multiprocessors(capsys: pytest.CaptureFixture[str]) -> None:
    ours, peer = row("optimus", 10) | {"held_ms": {"8": 10.0}}, row("peer", 10) | {"held_ms": {"8": 15.0}}
    report.print_table([ours, peer])
    assert "optimus against peer, 8 multiprocessors held: 1.500x, 1.500 to 1.500, 1 cells" in capsys.readouterr().out


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot([row("optimus", 10), row("peer", 20), row("optimus", 9, 16384, 1.0)], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000
