"""The card of evaluation as one HTML page: no script, nothing from the network, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from megatron.optimus.inference.card import Calibration, TaskCard

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #626a73; --line: #d9dde2; --paper: #fff; --mark: #2563a8;
  --fill: #2563a81f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa3ad; --line: #363b41; --paper: #16181b;
  --mark: #7db4ee; --fill: #7db4ee2b; } }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
h3 { font-size: 1rem; margin: .6rem 0 0; }
p { margin: .2rem 0 .8rem; color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; min-width: 24rem; width: 100%; overflow-wrap: normal; }
th { text-align: left; font-weight: 500; color: var(--soft); } td, th { padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.plots { display: flex; flex-wrap: wrap; gap: 1.2rem; } figure { margin: 0; width: 17rem; max-width: 100%; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.axis { stroke: var(--line); } .even { stroke: var(--soft); stroke-dasharray: 4 4; } .bar { fill: var(--fill);
  stroke: var(--mark); } .dot { fill: var(--mark); } .curve { fill: none; stroke: var(--mark); stroke-width: 2; }
"""


def page(title: str, facts: Mapping[str, str], cards: Sequence[TaskCard]) -> str:
    """Writes the card as one HTML page.

    Args:
        title: what was evaluated.
        facts: lines below it.
        cards: of the tasks.

    Returns:
        HTML.
    """
    lines = "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in facts.items())
    parts = [_correctness(cards), _calibration(cards), _reliability(cards), _shots(cards), _speed(cards)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1><p>{lines}</p>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> str:
    """A table whose first columns are texts, and all others numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        marks = ("" if place < num_texts else ' class="n"' for place in range(len(cells)))
        return (
            "<tr>"
            + "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
            + "</tr>"
        )

    return f'<div class="wide"><table>{row("th", head)}{"".join(row("td", one) for one in rows)}</table></div>'


def _correctness(cards: Sequence[TaskCard]) -> str:
    rows = [
        [card.name, metric, f"{value:.4g}", "" if error is None else f"{error:.2g}", str(card.num_items)]
        for card in cards
        for metric, (value, error) in card.scores.items()
    ]
    head = ["task", "metric", "value", "standard error", "items"]
    return f"<h2>Correctness</h2><p>The scores of each task, asked as it says.</p>{_table(head, rows, 2)}"


def _calibration(cards: Sequence[TaskCard]) -> str:
    own = [(card, card.calibration) for card in cards if card.calibration is not None]
    if not own:
        return ""
    plots = "".join(
        f"<figure><h3>{escape(card.name)}</h3>{_diagram(found)}<p>calibration error {found.ece:.3f}; mean confidence "
        f"{found.confidence:.2f}, accuracy {found.accuracy:.2f}, {card.num_items} items</p></figure>"
        for card, found in own
    )
    return (
        "<h2>Calibration</h2><p>How often the chosen answer is right (bars), by the probability that the model gives "
        "it among the choices. On the dashed line the model knows what it knows. The calibration error (ECE) is the "
        f'mean distance from it.</p><div class="plots">{plots}</div>'
    )


_LEFT, _TOP, _SIZE = 44, 8, 200


def _frame(x_name: str, y_name: str, inside: str) -> str:
    bottom, right = _TOP + _SIZE, _LEFT + _SIZE
    return (
        f'<svg viewBox="0 0 {right + 10} {bottom + 32}" role="img">{inside}'
        f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 28}" text-anchor="middle">{escape(x_name)}</text>'
        f'<text x="10" y="{_TOP + _SIZE / 2}" text-anchor="middle" transform="rotate(-90 10 {_TOP + _SIZE / 2})">'
        f"{escape(y_name)}</text></svg>"
    )


def _diagram(found: Calibration) -> str:
    """The reliability diagram."""
    width, bottom = _SIZE / len(found.bins), _TOP + _SIZE
    bars = "".join(
        f'<rect class="bar" x="{_LEFT + place * width + 1:.1f}" y="{bottom - own.accuracy * _SIZE:.1f}" '
        f'width="{width - 2:.1f}" height="{own.accuracy * _SIZE:.1f}"><title>{own.count} items, confidence '
        f"{own.confidence:.2f}, right {own.accuracy:.2f}</title></rect>"
        f'<circle class="dot" r="3" cx="{_LEFT + own.confidence * _SIZE:.1f}" '
        f'cy="{bottom - own.accuracy * _SIZE:.1f}"/>'
        for place, own in enumerate(found.bins)
        if own is not None
    )
    line = f'<path class="even" d="M{_LEFT} {bottom}L{_LEFT + _SIZE} {_TOP}"/>'
    ticks = "".join(
        f'<text x="{_LEFT + at * _SIZE}" y="{bottom + 14}" text-anchor="middle">{at:g}</text>'
        f'<text x="{_LEFT - 4}" y="{bottom - at * _SIZE + 4}" text-anchor="end">{at:g}</text>'
        for at in (0, 0.5, 1)
    )
    return _frame("confidence", "accuracy", bars + line + ticks)


def _reliability(cards: Sequence[TaskCard]) -> str:
    rows = []
    for card in cards:
        kinds = {"examples (seeds)": [*card.by_seed.values()], "instructions": [*card.by_instruction.values()]}
        for kind, own in kinds.items():
            if len(own) > 1:
                low, high = min(own), max(own)
                numbers = [f"{number:.4g}" for number in (fmean(own), low, high, high - low)]
                rows.append([card.name, card.metric, kind, str(len(own)), *numbers])
    if not rows:
        return ""
    words = sorted({text for card in cards for text in card.by_instruction if text})
    said = "; ".join(f"“{text}”" for text in words)
    head = ["task", "metric", "what changes", "ways", "mean", "lowest", "highest", "spread"]
    return (
        "<h2>Reliability</h2><p>The same questions, after other examples and after other instructions: a score with a "
        f"large spread says as much of the prompt as of the model. Instructions: none; {escape(said)}</p>"
        f"{_table(head, rows, 3)}"
    )


def _shots(cards: Sequence[TaskCard]) -> str:
    own = [card for card in cards if len(card.by_shots) > 1]
    if not own:
        return ""
    plots = "".join(
        f"<figure><h3>{escape(card.name)}</h3>{_curve(card.by_shots, card.metric)}</figure>" for card in own
    )
    return f'<h2>Number of shots</h2><p>Examples before each question.</p><div class="plots">{plots}</div>'


def _curve(values: Mapping[int, float], metric: str) -> str:
    top = max(1.0, *values.values()) if min(values.values()) >= 0 else max(values.values())
    low = min(0.0, *values.values())
    most, bottom = max(*values, 1), _TOP + _SIZE
    points = [
        (_LEFT + 8 + count / most * (_SIZE - 16), bottom - (value - low) / ((top - low) or 1) * _SIZE, count, value)
        for count, value in sorted(values.items())
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
    dots = "".join(
        f'<circle class="dot" r="4" cx="{x:.1f}" cy="{y:.1f}"><title>{count} shots: {value:.4g}</title></circle>'
        f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{count}</text>'
        f'<text x="{x:.1f}" y="{y - 8 if y > _TOP + 16 else y + 18:.1f}" text-anchor="middle">{value:.3g}</text>'
        for x, y, count, value in points
    )
    return _frame("shots", metric, f'<path class="curve" d="{path}"/>{dots}')


def _speed(cards: Sequence[TaskCard]) -> str:
    rows = []
    for card in cards:
        rate = card.num_items / card.seconds if card.seconds else 0.0
        rows.append([card.name, f"{card.seconds:.2f}", str(card.num_items), str(card.num_requests), f"{rate:.3g}"])
    head = ["task", "seconds", "items", "requests", "items per second"]
    return f"<h2>Speed</h2><p>Of the evaluation under Correctness, on the ranks named above.</p>{_table(head, rows, 1)}"
