"""Table and chart of what moe_layer.py measured, in one run or several."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

Cell = tuple[str, int, float]  # shape, tokens, zipf

# What the table and the chart need of a measurement.
USED = {"shape", "tokens", "zipf", "implementation", "forward_backward_ms", "forward_backward_tflops"}


def out_path(text: str) -> Path:
    """For argparse: the path to which .json and .png are added. Nothing is cut from it: v1.2 becomes v1.2.json."""
    path = Path(text)
    if path.suffix in (".json", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: .json and .png are added to it; give {path.with_suffix('')}")
    if path.name in ("", "..") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text} is a folder; add the files' name without suffix")
    if not path.parent.is_dir():  # before hours of measuring
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    return path


def with_ending(out: Path, ending: str) -> Path:
    return out.with_name(out.name + ending)


def read(path: Path) -> dict:
    """A file that moe_layer.py wrote. Raises ValueError for any other."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    keys = result.keys() if isinstance(result, dict) else set()
    if missing := [key for key in ("device", "torch", "measurements") if key not in keys]:
        raise ValueError(f"{path} is no result of moe_layer.py: it has no {', '.join(missing)}")
    rows = result["measurements"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= USED for row in rows):
        raise ValueError(f"{path} is no result of moe_layer.py: not every measurement has {', '.join(sorted(USED))}")
    return result


def begin(out: Path | None, machine: dict[str, str]) -> dict:
    """The result to which a run adds: without measurements, or with those that OUT.json has already.

    Raises ValueError where that file is no result of moe_layer.py, or one of another machine.
    """
    new = {**machine, "measurements": []}
    if out is None or not with_ending(out, ".json").exists():
        return new
    earlier = read(with_ending(out, ".json"))
    _refuse_different_machines([earlier, new])
    return earlier


def write(result: dict, out: Path) -> None:
    with_ending(out, ".json").write_text(json.dumps(result))


def _refuse_different_machines(results: list[dict]) -> None:
    machines = list(dict.fromkeys(f"{result['device']} with torch {result['torch']}" for result in results))
    if len(machines) > 1:
        raise ValueError(
            "measurements of different machines or versions of torch cannot be compared, give those of one: "
            + "; ".join(machines)
        )


def merge(paths: list[Path]) -> dict:
    """The measurements of several files, all of one device. A cell that several have comes from the last of them.

    A cell is never put together from two files: only what ran in one rotation can be compared. Raises ValueError for
    files of different machines, for others than moe_layer.py's, and where none has a measurement.
    """
    results = [read(path) for path in paths]
    _refuse_different_machines(results)
    cells: dict[tuple[str, int], list[dict]] = {}
    for result in results:
        own: dict[tuple[str, int], list[dict]] = {}
        for row in result["measurements"]:
            own.setdefault((row["shape"], row["tokens"]), []).append(row)
        cells |= own
    if not cells:
        raise ValueError(f"no measurement in {', '.join(str(path) for path in paths)}")
    return {**results[0], "measurements": _in_order([row for rows in cells.values() for row in rows])}


def _in_order(rows: list[dict]) -> list[dict]:
    """Shapes as they first appear, each one's cells by tokens, then skew; within a cell the order stays."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    return sorted(rows, key=lambda row: (shapes.index(row["shape"]), row["tokens"], row["zipf"]))


def _cells(rows: list[dict]) -> dict[Cell, dict[str, dict]]:
    cells: dict[Cell, dict[str, dict]] = {}
    for row in _in_order(rows):
        cells.setdefault((row["shape"], row["tokens"], row["zipf"]), {})[row["implementation"]] = row
    return cells


def print_table(rows: list[dict]) -> None:
    """Forward + backward of every cell in TFLOP/s, then how much faster each of ours is than each peer."""
    if not rows:
        return
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cells = _cells(rows)
    print("\nforward + backward, TFLOP/s (milliseconds); zipf after the tokens where routing is skewed")
    print(" " * 29 + "".join(f"{name:>22s}" for name in names))
    for (shape, tokens, zipf), cell in cells.items():
        label = f"{shape:15s} {tokens:6d}" + (f"  z{zipf:3.1f}" if zipf else "")
        texts = [
            f"{cell[n]['forward_backward_tflops']:.4g} ({cell[n]['forward_backward_ms']:.3f})" if n in cell else "-"
            for n in names
        ]
        print(f"{label:29s}" + "".join(f"{text:>22s}" for text in texts))
    even = [cell for key, cell in cells.items() if not key[2]]
    for ours in (name for name in names if name.startswith("optimus")):
        for peer in (name for name in names if not name.startswith("optimus")):
            both = [(cell[ours], cell[peer]) for cell in even if ours in cell and peer in cell]
            _print_ratios(
                f"{ours} against {peer}", [b["forward_backward_ms"] / a["forward_backward_ms"] for a, b in both]
            )
            long = [(a["sustained"], b["sustained"]) for a, b in both if a.get("sustained") and b.get("sustained")]
            _print_ratios(f"{ours} against {peer}, sustained", [theirs["ms"] / mine["ms"] for mine, theirs in long])
            for count in both[0][0].get("held_ms", {}) if both else ():
                beside = [(a.get("held_ms", {}), b.get("held_ms", {})) for a, b in both]
                ratios = [theirs[count] / mine[count] for mine, theirs in beside if count in mine and count in theirs]
                _print_ratios(f"{ours} against {peer}, {count} multiprocessors held", ratios)
    for key, cell in cells.items():
        unskewed = cells.get((*key[:2], 0.0), {})
        for name in cell:
            if key[2] and name in unskewed:
                loss = 1 - unskewed[name]["forward_backward_ms"] / cell[name]["forward_backward_ms"]
                print(f"{name}, {key[0]}, {key[1]} tokens: zipf {key[2]} loses {100 * loss:.1f}%")


def _print_ratios(what: str, ratios: list[float]) -> None:
    if ratios:
        mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        print(f"{what}: {mean:.3f}x, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} cells")


def plot(rows: list[dict], path: Path) -> None:
    """One panel per shape; a group of bars per number of tokens (and skew), a bar per implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = _cells(rows)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    columns = min(2, len(shapes))
    lines = math.ceil(len(shapes) / columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 3 * lines + 0.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, shape in zip(axes.flat, shapes, strict=False):
        place, ticks, labels = 0.0, [], []
        for (own, tokens, zipf), cell in cells.items():
            if own != shape:
                continue
            drawn = [name for name in names if name in cell]
            ticks.append(place + (len(drawn) - 1) / 2)
            labels.append(f"T = {tokens:,}" + (f"\nzipf {zipf}" if zipf else ""))
            for name in drawn:
                speed = cell[name]["forward_backward_tflops"]
                axis.bar(place, speed, 0.9, color=f"C{names.index(name)}", label=name)
                axis.annotate(
                    f"{speed:.3g}",
                    (place, speed),
                    xytext=(0, 3),  # points above the bar
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=6,
                    rotation=90,
                )
                place += 1
            place += 1
        axis.set_xticks(ticks, labels, fontsize=7)
        axis.set_title(shape, fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    for line in axes:
        line[0].set_ylabel("forward + backward, TFLOP/s", fontsize=8)
    handles = {}
    for axis in axes.flat:
        drawn, texts = axis.get_legend_handles_labels()
        handles |= dict(zip(texts, drawn, strict=True))
    order = [name for name in names if name in handles]
    figure.legend(
        [handles[n] for n in order], order, frameon=False, fontsize=8, ncols=len(order), loc="outside upper center"
    )
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
