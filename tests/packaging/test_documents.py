"""Every link of the documents leads to a file that is there, and to a heading that it has; files they name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]+)?\)")
NAMED = re.compile(
    r"(?<![\w/.-])((?:tests|benchmarks|tools|examples|megatron|deepspeed_ext|csrc|docs)/[\w/-]+\.(?:py|md|sh|pbs))\b"
)
ABSENT = {"megatron/__init__.py"}  # as CONTRIBUTING.md says
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.split()
    found = [ROOT / name for name in listed] or [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    return [path for path in found if path.exists()]


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    """The links of a document that lead nowhere."""
    wrong = []
    for target, anchor in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (path.parent / target).resolve() if target else path
        has_anchor = not anchor or place.suffix != ".md" or not place.exists() or anchor in anchors(place)
        if not place.exists() or not has_anchor:
            wrong.append(f"{path.name}: {target}{anchor}")
    return wrong


def test_links_lead_somewhere() -> None:
    assert [link for path in documents() for link in broken(path)] == []


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{path.name}: {name}"
        for path in documents()
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in ABSENT and not (ROOT / name).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("link", ["nowhere.md", "b.md#no-such-heading", "#there-is"])
def test_a_broken_link_is_found(link: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"# There is not\n\n[good](b.md#one-more-thing), [bad]({link})\n")
    (tmp_path / "b.md").write_text("# One: more thing\n")
    assert broken(tmp_path / "a.md") == [f"a.md: {link}"]
