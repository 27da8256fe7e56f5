"""Fixtures of several files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import L, write_tokens


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    sizes = [10 * L + 1, 3, 25 * L, 17 * L + 5]
    return [write_tokens(tmp_path / f"f{i}", 10_000 * i, size) for i, size in enumerate(sizes)]
