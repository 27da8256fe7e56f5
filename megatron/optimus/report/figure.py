"""Draws panels of lines as a picture file; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.optimus.config.schema import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[Sequence[float], Sequence[float]]  # x and y


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]  # by their names in the legend
    is_log_x: bool = True
    is_log_y: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)  # values of x to be marked, by name
    tick_labels: Sequence[str] = ()  # in the place of the values 0, 1, ... of x
    x_ticks: Sequence[float] = ()  # the only values of x that are labelled, on a scale of powers of two
    y_range: tuple[float, float] | None = None


def is_drawable() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Writes a picture, whose format its name says (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, does not know the format, or the file cannot be written.
    """
    if not is_drawable():
        raise ConfigError(f"{path} needs matplotlib: pip install matplotlib (extra [plot])")
    try:
        figure_of(panels).savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}; name a .png, .svg or .pdf") from error


def figure_of(panels: Sequence[Panel]) -> Figure:
    """Draws panels side by side. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(6.0 * len(panels), 4.5), dpi=110, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, (x, y) in panel.lines.items():
            axes.plot(x, y, marker="o" if len(x) < 50 else "", markersize=4, linewidth=1.3, label=name)
        for name, at in panel.marks.items():
            axes.axvline(at, color="0.5", linestyle="--", linewidth=1)
            axes.annotate(name, (at, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right")
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.is_log_x:
            axes.set_xscale("log", base=2 if panel.x_ticks else 10)
        if panel.is_log_y:
            axes.set_yscale("log")
        if panel.x_ticks:
            axes.set_xticks(panel.x_ticks, [f"{value:,.0f}" for value in panel.x_ticks])
        if panel.tick_labels:
            axes.set_xticks(range(len(panel.tick_labels)), panel.tick_labels)
        if panel.y_range is not None:
            axes.set_ylim(*panel.y_range)
        axes.grid(alpha=0.25, which="both")
        if any(panel.lines):
            axes.legend(frameon=False, fontsize="small")
    return figure
