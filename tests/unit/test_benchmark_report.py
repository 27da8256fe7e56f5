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


def test_cells_are_in_order_whatever_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"shape": "mula-20b"}
    first = write(
        tmp_path / "a.json", [row("z", 1, 16384, 1.0), row("a", 1, 16384, 1.0), row("z", 2, 16384), row("a", 3, 32768)]
    )
    second = write(tmp_path / "b.json", [row("z", 4) | other, row("z", 5)])
    rows = report.merge([first, second])["measurements"]
    assert [(r["shape"], r["tokens"], r["zipf"], r["implementation"]) for r in rows] == [
        ("mula-7b", 8192, 0.0, "z"),
        ("mula-7b", 16384, 0.0, "z"),
        ("mula-7b", 16384, 1.0, "z"),
        ("mula-7b", 16384, 1.0, "a"),
        ("mula-7b", 32768, 0.0, "a"),
        ("mula-20b", 8192, 0.0, "z"),
    ]
    report.print_table([row("a", 1, 16384), row("a", 1, 8192, 1.0), row("a", 1, 8192)])  # of one run
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mula-7b")]
    assert [line.split()[1:3] for line in lines] == [["8192", "5000"], ["8192", "z1.0"], ["16384", "5000"]]


def test_files_without_a_measurement_make_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no measurement in .*a\.json"):
        report.merge([write(tmp_path / "a.json", [])])


def test_a_merged_file_can_be_merged_again_with_its_commits(tmp_path: Path) -> None:
    rows = [row("optimus", 10) | {"commit": "abc"}, row("optimus", 20, 16384)]  # one of before commits were kept
    merged = report.merge([write(tmp_path / "a.json", rows)])
    report.write(merged, tmp_path / "b")
    assert report.merge([tmp_path / "b.json"])["measurements"] == rows


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
