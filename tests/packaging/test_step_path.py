"""The README's path of one training step exists as listed and is short enough to read in one sitting."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)


def function_lines(path: str, qualified_name: str) -> int:
    """Lines of a function or method, found by its dotted name inside the file."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in qualified_name.split("."):
        [node] = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        body = node.body
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_one_step_fits_in_one_sitting() -> None:
    section = (ROOT / "README.md").read_text().split("## Follow one step", 1)[1].split("\n## ", 1)[0]
    entries = ENTRY.findall(section)
    lines = sum(function_lines(path, name) for path, name in entries)
    assert 10 <= len(entries) <= 15
    assert len({path for path, _ in entries}) <= 12
    assert lines <= 900
    stated = re.search(r"(\d+) functions in (\d+) files, about (\d+) lines", section)
    assert stated is not None
    functions, files, about = (int(number) for number in stated.groups())
    assert (functions, files) == (len(entries), len({path for path, _ in entries}))
    assert abs(about - lines) <= 0.1 * lines, f"README says about {about} lines, they are {lines}"
