"""The card of evaluation: its numbers by hand, and a page that is well formed, self-contained and escapes its texts."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from megatron.optimus.inference.card import TaskCard, _answers, _standard_error, calibration
from megatron.optimus.inference.card_page import page


def test_calibration_by_hand() -> None:
    found = calibration([(0.95, True), (0.91, False), (0.35, False), (1.0, True)])
    assert found is not None
    assert [None if one is None else (one.count, one.accuracy) for one in found.bins][3] == (1, 0.0)
    assert found.bins[9] is not None and found.bins[9].count == 3
    assert found.bins[9].confidence == pytest.approx(0.953333, rel=1e-5)
    assert found.ece == pytest.approx((3 * abs(0.953333 - 2 / 3) + 0.35) / 4, rel=1e-5)
    assert (found.accuracy, found.confidence) == (0.5, pytest.approx(0.8025))
    assert sum(one is not None for one in found.bins) == 2 and calibration([]) is None


def test_confidence_is_the_choices_share_and_errors_are_of_means() -> None:
    samples = [
        {"doc_id": 0, "filter": "none", "filtered_resps": [(-1.0, False), (-2.0, True)], "acc": 1.0},
        {"doc_id": 1, "filter": "none", "filtered_resps": [(-800.0, False), (-800.0, True)], "acc": 0.0},
        {"doc_id": 1, "filter": "none", "filtered_resps": [], "perplexity": (1.0, 2)},
    ]
    assert _answers(samples) == [(pytest.approx(0.7310586), True), (pytest.approx(0.5), False)]
    assert _standard_error("acc,none", 0.5, samples[:2]) == pytest.approx(0.5)
    assert _standard_error("acc,none", 0.7, samples[:2]) is None, "it is no mean over items"
    assert _standard_error("perplexity,none", 0.7, samples[2:]) is None


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
