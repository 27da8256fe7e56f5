"""The card as a page: well formed, every text escaped."""

from __future__ import annotations

from html.parser import HTMLParser

from megatron.optimus.inference.card import TaskCard, calibration
from megatron.optimus.inference.card_page import page


class Reader(HTMLParser):
    """Tags that are open, and what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.loaded.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_escapes() -> None:
    name = "<script>alert(1)</script>&"
    card = TaskCard(
        *(name, "acc", 4, 2, {"acc": (0.5, 0.25), "bits": (-1.5, None)}, 2.0, 16),
        calibration=calibration([(0.95, True), (0.35, False)]),
        by_seed={1: 0.5, 2: 0.75},
        by_instruction={"": 0.5, "Say <b>": 0.25},
        by_shots={0: 0.0, 4: -0.5},
    )
    bare = TaskCard("bare", "x", 1, 0, {"x": (1.0, None)}, 0.0, 1)
    reader = Reader()
    reader.feed(page(name, {"checkpoint": "<i>"}, [card, bare]))
    reader.close()
    assert reader.open == [] and reader.loaded == []
    for text in (name, "calibration error 0.200", "Say <b>", "<i>", "-0.5", "shots", "0.375"):
        assert text in reader.text, text
    assert "Calibration" not in page("x", {}, [bare]), "it has no choices"
