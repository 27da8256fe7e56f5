"""Panels of lines as a picture: what is drawn, and files that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.report import figure
from megatron.optimus.report.figure import Panel, draw, figure_of, is_drawable

pytest.importorskip("matplotlib")
PANELS = [
    Panel("loss", "lr", "nats", {"a": ([1, 10, 100], [3, 2, 4]), "b": ([1, 10], [5, 6])}, marks={"best": 10.0}),
    Panel(
        "ranks", "ranks", "%", {"a": ([2, 4, 8], [100, 90, 80])}, is_log_y=True, x_ticks=[2, 4, 8], y_range=(60, 105)
    ),
    Panel("names", "", "", {"a": ([0, 1], [1, 2])}, is_log_x=False, tick_labels=["adam", "muon"]),
]


def test_what_is_drawn() -> None:
    loss, ranks, names = figure_of(PANELS).axes
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines[:2]] == [
        ([1, 10, 100], [3, 2, 4]),
        ([1, 10], [5, 6]),
    ]
    assert loss.get_xscale() == "log" and loss.get_title() == "loss" and loss.get_xlabel() == "lr"
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["a", "b"]
    assert [text.get_text() for text in loss.texts] == ["best"] and list(loss.lines[2].get_xdata()) == [10, 10]
    assert ranks.get_yscale() == "log" and ranks.get_ylim() == (60, 105)
    assert [label.get_text() for label in ranks.get_xticklabels()] == ["2", "4", "8"]
    assert names.get_xscale() == "linear"
    assert [label.get_text() for label in names.get_xticklabels()] == ["adam", "muon"]


def test_the_format_follows_from_the_name(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", PANELS)
    draw(tmp_path / "a.svg", PANELS[:1])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()
    for path in (tmp_path / "a.xyz", tmp_path / "nowhere" / "a.png"):
        with pytest.raises(ConfigError, match=r"cannot be written: .*; name a \.png, \.svg or \.pdf"):
            draw(path, PANELS[:1])


def test_without_matplotlib_the_line_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_drawable()
    monkeypatch.setattr(figure, "is_drawable", lambda: False)
    with pytest.raises(ConfigError, match="needs matplotlib: pip install matplotlib"):
        draw(tmp_path / "a.png", PANELS)
