"""Corpora and runs that the tests of commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.report.conftest import make_run

__all__ = ["make_run"]  # a fixture


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MB: several batches for each worker."""
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    with open(path, "w") as stream:
        for i in range(4000):
            text = "" if i % 97 == 5 else f"{i}: " + "the same words again " * (i % 97)
            stream.write(json.dumps({"text": text, "title": f"Title {i}"}) + "\n")
    return path
