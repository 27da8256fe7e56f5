"""The test for ordered files: an alarm where an end is unlike the rest, none on shuffled files, however they look."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.data.ordered import _FACTOR, how_ordered, is_ordered


def corpus(generator: np.random.Generator, count: int, topics: int) -> list[np.ndarray]:
    """Documents of uneven length, each of one topic, whose words are half of a Zipf distribution and half its own."""
    documents = []
    for topic in np.arange(count) * topics // count:
        size = int(generator.lognormal(4, 1)) + 1
        common, own = generator.zipf(1.3, size) % 20_000, 20_000 + 100 * topic + generator.zipf(1.5, size) % 100
        documents.append(np.where(generator.random(size) < 0.8, common, own).astype(np.int32))
    return documents


def write(prefix: Path, documents: list[np.ndarray]) -> str:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def test_sorted_by_topic(tmp_path: Path) -> None:
    documents = corpus(np.random.default_rng(0), 3000, topics=20)
    assert how_ordered(write(tmp_path / "sorted", documents)) > 2 * _FACTOR
    end_alone = [*np.random.default_rng(1).permutation(np.array(documents[:2900], object)), *documents[2900:]]
    assert is_ordered(write(tmp_path / "end", end_alone))


@pytest.mark.parametrize("topics", [1, 20, 500])
def test_shuffled_files_raise_no_alarm(tmp_path: Path, topics: int) -> None:
    generator = np.random.default_rng(topics)
    documents = np.array([*corpus(generator, 3000, topics), np.arange(0)], object)
    prefix = write(tmp_path / "x", list(generator.permutation(documents)))
    found = [how_ordered(prefix, seed) for seed in range(40)]
    assert 0 < max(found) < _FACTOR


def test_too_few_documents_to_say(tmp_path: Path) -> None:
    assert how_ordered(write(tmp_path / "few", corpus(np.random.default_rng(0), 400, topics=20))) == 0
    assert how_ordered(write(tmp_path / "none", [])) == 0
    assert how_ordered(write(tmp_path / "empty", [np.arange(0)] * 3000)) == 0
    with pytest.raises(DataError, match="no such file"):
        how_ordered(str(tmp_path / "missing"))
