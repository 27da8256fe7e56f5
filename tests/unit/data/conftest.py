"""Fixtures of several files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import L, write_tokens


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    sizes = [10 * L + 1, 3, 25 * L, 17 * L + 5]
    return [write_tokens(tmp_path / f"f{i}", 10_000 * i, size) for i, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def corpora_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """web: 3 files, 90 instances, code: 2 files, 30, wiki: 1 file, 10."""
    folder = tmp_path_factory.mktemp("corpora")
    for corpus, sizes in (("web", [20, 30, 40]), ("code", [25, 5]), ("wiki", [10])):
        for i, size in enumerate(sizes):
            base = {"web": 0, "code": 10_000, "wiki": 20_000}[corpus]
            write_tokens(folder / corpus / f"part-{i}", base + 1000 * i, size * L + 1)
    return folder
