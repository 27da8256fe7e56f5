"""The page in a real browser, and what ``optimus report`` says."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.optimus.report.page import page, write_report_of_run
from megatron.optimus.report.read import read_run

from .conftest import NAME, line, write_lines

OLD = Path(__file__).parents[2] / "fixtures" / "checkpoint_v0_5"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """Collects a page's elements, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.data += data


def data_of(text: str) -> dict:
    return json.loads(Elements(text).data)


def test_one_page_holds_everything_and_names_stay_text(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(f"{NAME.replace('/', '|')}@@JS@@")
    text = page([read_run(folder)])
    found = Elements(text)
    assert [tag for tag, _ in found.tags].count("script") == 2, "a name became an element"
    assert not [attributes for _, attributes in found.tags if {"src", "href"} & attributes.keys()]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace('http-equiv="Content', "")
    [run] = json.loads(found.data)["runs"]
    assert f"valid_loss/{NAME}" in run["curves"]["points"] and run["samples"][0]["prompt"] == NAME
    facts = run["facts"]
    assert (facts["step"], facts["planned_steps"], facts["tokens"], facts["devices"]) == (12, 20, 12000, 4)
    assert facts["tokens_per_second"] == 500 and facts["valid_loss"] == 4.5 and facts["training_s"] == 24
    assert facts["parameters"] > facts["active_parameters"] > 0


def test_runs_of_all_kinds_give_a_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    empty = tmp_path / "begun"
    empty.mkdir()
    (empty / "config.yaml").write_text("model: {num_layers: 2}\n")
    other = make_run("other/first", num_steps=1)
    data = data_of(page([read_run(folder) for folder in (make_run(), other, OLD, empty)]))
    assert [run["name"] for run in data["runs"]] == [f"{tmp_path.name}/first", "other/first", OLD.name, "begun"]
    assert [run["facts"]["step"] for run in data["runs"]][1:] == [1, 8, 0]
    assert data["runs"][3]["notes"] and not data["runs"][2]["notes"]


def test_a_run_too_long_for_the_end_of_a_run(make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run()
    assert write_report_of_run(folder) == folder / "report.html"
    monkeypatch.setattr("megatron.optimus.report.page._LARGEST_AT_THE_END", 100)
    assert write_report_of_run(folder) is None


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_in_a_browser(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """What the script made of the page: every section, no element of a name, no error."""
    long = make_run("long")
    lines = [line(step, **({"valid_loss": 3.0} if step % 500 == 0 else {})) for step in range(1, 30_001)]
    write_lines(long / "metrics.jsonl", lines)
    text = page([read_run(folder) for folder in (make_run(), make_run("second", seed=2), OLD, long)])
    probe = """<script>
      const at = document.querySelector("svg.plot").getBoundingClientRect();
      const send = (kind, x) => document.querySelector("svg.plot").dispatchEvent(new PointerEvent(kind,
        {clientX: at.left + x, clientY: at.top + 50, pointerType: "mouse", button: 0, bubbles: true, pointerId: 1}));
      SVGElement.prototype.setPointerCapture = () => {};
      send("pointermove", 200); document.body.dataset.tip = tip.textContent;
      send("pointerdown", 300); send("pointermove", 400); send("pointerup", 400);
      document.body.dataset.zoom = state.zoom.length;
      for (const button of document.querySelectorAll("button")) button.click();
      document.body.dataset.paths = document.querySelectorAll("path.curve").length;
    </script>"""
    errors = "<script>window.onerror = text => { document.documentElement.dataset.error = text; };</script></head>"
    file = tmp_path / "page.html"
    file.write_text(text.replace("</head>", errors, 1).replace("</body>", probe + "</body>"), encoding="utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900", file.as_uri()]
    dom = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100).stdout
    found = Elements(dom)
    root = dict(found.tags)["html"]
    assert root.get("data-ready") == "true" and "data-error" not in root, root
    body = dict(found.tags)["body"]
    assert "30,000 of 20" in dom and "tokens" in (body["data-tip"] or "") and body["data-zoom"] == "2"
    assert "<script>alert" not in dom and "&lt;script&gt;alert('x')&lt;/script&gt;" in dom
    for title in ("Validation sets", "Optimization", "Where the time went", "Experts", "Samples", "Configuration"):
        assert f"<h2>{title}</h2>" in dom, title
    assert "training.seed" in dom and "differences only" in dom
