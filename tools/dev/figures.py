"""Draws the figures of docs/concepts.md as SVG: ``python tools/dev/figures.py`` writes docs/images/*.svg."""

from __future__ import annotations

import argparse
import html
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
BLUE, GREEN, ORANGE, GREY, RED = "#dbe7ff", "#d9f2e0", "#ffe8cc", "#eceff1", "#ffd9d9"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG under construction; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, text: str, colour: str = GREY) -> None:
        """A rounded box with centred lines of text."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{colour}' stroke='#455a64'/>"
        )
        lines = text.split("\n")
        for number, line in enumerate(lines):
            middle = y + height / 2 + 14 * (number - (len(lines) - 1) / 2) + 4
            self.text(x + width / 2, middle, line, anchor="middle", size=11)

    def text(self, x: float, y: float, line: str, anchor: str = "start", size: int = 12, bold: bool = False) -> None:
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x}' y='{y}' {FONT} font-size='{size}' text-anchor='{anchor}' fill='#1c2529'{weight}>"
            f"{html.escape(line)}</text>"
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        self._parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#455a64' stroke-width='1.5' marker-end='url(#a)'/>"
        )

    def chain(self, boxes: list[tuple[str, str]], *, y: int, width: int, height: int, pitch: int) -> None:
        """A row of boxes (text, colour), each with an arrow from the one before it."""
        for number, (text, colour) in enumerate(boxes):
            x = 10 + pitch * number
            self.box(x, y, width, height, text, colour)
            if number:
                self.arrow(x - pitch + width, y + height // 2, x, y + height // 2)

    def save(self, name: str) -> None:
        width, height = self._size
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
            "<defs><marker id='a' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            "<path d='M0 0 L8 4 L0 8 z' fill='#455a64'/></marker></defs>"
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>"
        )
        (IMAGES / name).write_text(head + "".join(self._parts) + "</svg>\n", encoding="utf-8")


def one_step() -> None:
    picture = Picture(860, 230)
    stages = [
        ("loader\nbatch of tokens", GREY),
        ("decoder\nattention, norms", BLUE),
        ("router\nK of E experts", GREEN),
        ("dispatcher\ntokens to experts", GREEN),
        ("experts\none fused kernel", GREEN),
        ("combine\nsums per token", GREEN),
        ("loss\nchunks of logits", BLUE),
    ]
    picture.chain(stages, y=30, width=106, height=50, pitch=121)
    picture.text(10, 20, "forward of a micro-batch", bold=True)
    backward = [
        ("backward\nlayer by layer", BLUE),
        ("bucket full:\nreduce-scatter", ORANGE),
        ("global norm\nand clipping", ORANGE),
        ("update of the\nowned shard", ORANGE),
        ("all-gather of\nnew weights", ORANGE),
        ("metrics, log\nmaybe evaluate", GREY),
        ("maybe save\na checkpoint", GREY),
    ]
    picture.text(10, 130, "backward, optimizer, outputs", bold=True)
    picture.chain(backward, y=140, width=106, height=50, pitch=121)
    picture.text(
        10, 215, "Orange runs beside what follows or precedes it: reductions beside backward, gathers beside forward."
    )
    picture.save("one_step.svg")


def layouts() -> None:
    picture = Picture(700, 250)
    picture.text(10, 20, "8 ranks, tp=2, ep=4: the same ranks in two views", bold=True)
    picture.text(10, 50, "dense view: dp=4 x tp=2")
    picture.text(370, 50, "expert view: edp=2 x ep=4")
    for rank in range(8):
        row, column = divmod(rank, 2)
        picture.box(10 + 140 * column, 60 + 45 * row, 130, 38, f"rank {rank}\ndp {row}, tp {column}", BLUE)
        replica, part = divmod(rank, 4)
        picture.box(
            370 + 160 * replica, 60 + 45 * part, 150, 38, f"rank {rank}\nexperts {16 * part}-{16 * part + 15}", GREEN
        )
    picture.save("layouts.svg")


def ep_aware_zero() -> None:
    picture = Picture(760, 260)
    picture.text(10, 20, "Who owns optimizer states: 4 ranks, EP 2", bold=True)
    for rank in range(4):
        x = 130 + 155 * rank
        picture.text(x + 70, 45, f"rank {rank}", anchor="middle")
        picture.box(x, 55, 140, 34, f"dense states, part {rank} of 4", BLUE)
        experts = "experts 0-31" if rank % 2 == 0 else "experts 32-63"
        picture.box(x, 97, 140, 48, f"{experts}\npart {rank // 2} of 2", GREEN)
        picture.box(x, 175, 140, 34, f"{experts}: weights", GREY)
    picture.text(10, 76, "sharded over dp")
    picture.text(10, 118, "sharded over edp")
    picture.text(10, 134, "(ranks 0, 2 and 1, 3)", size=11)
    picture.text(10, 196, "replicated over edp")
    picture.text(
        10, 240, "Each state has one owner. A rank updates what it owns and gathers the rest of its own weights."
    )
    picture.save("ep_aware_zero.svg")


def checkpoint() -> None:
    picture = Picture(840, 150)
    picture.text(10, 20, "A save, beside training", bold=True)
    steps = [
        ("snapshot to\nhost memory", BLUE),
        ("each rank writes\nits own pieces, hashed", ORANGE),
        ("all ranks agree\nthat all succeeded", ORANGE),
        ("rank 0 writes\nmanifest.json, fsync", ORANGE),
        ("one rename makes\nit visible", GREEN),
        ("older ones\nare deleted", GREY),
    ]
    picture.chain(steps, y=35, width=124, height=54, pitch=138)
    picture.text(
        10, 120, "Only the snapshot stops training. A crash at any point leaves the checkpoint before as it was."
    )
    picture.save("checkpoint.svg")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for draw in (one_step, layouts, ep_aware_zero, checkpoint):
        draw()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
