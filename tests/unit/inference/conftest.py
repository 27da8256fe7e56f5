"""A pair of token files with a tokenizer's identity, and tasks that are made of its held-out documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.commands.make_tasks import main
from tests.unit.inference.cases import OPTIONS, pair_of_documents


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_of_documents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tasks(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert main([str(pair), "--out", str(folder), *OPTIONS]) == 0
    return folder
