"""Hooks of mkdocs.yml: the README is the first page, and files outside docs/ that pages link to are on the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_SITE_PAGES = {"README.md": "index.md"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as index.md, and every file outside docs/ that a page links to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=_page(ROOT / "README.md", "index.md")))
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            name = _site_name(path)
            if path.is_file() and name.startswith("source/") and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links that leave docs/ to the site's copies."""
    if page.file.src_uri in _SITE_PAGES.values():
        return markdown
    return _rewritten(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def _page(path: Path, site_name: str) -> str:
    return _rewritten(path.read_text(encoding="utf-8"), path, site_name)


def _rewritten(text: str, source: Path, site_name: str) -> str:
    """The text of ``source`` with its links relative to its place in the site."""

    def link(match: re.Match[str]) -> str:
        name = _site_name((source.parent / match[1]).resolve())
        return f"]({os.path.relpath(name, Path(site_name).parent)}{match[2] or ''})"

    return _LINK.sub(link, text)


def _site_name(path: Path) -> str:
    """Where a file of the tree is in the site; Markdown outside docs/ stays Markdown and becomes a text file."""
    name = path.relative_to(ROOT).as_posix()
    if name in _SITE_PAGES:
        return _SITE_PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return "source/" + (name + ".txt" if name.endswith(".md") else name)
