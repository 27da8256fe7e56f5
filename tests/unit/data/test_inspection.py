"""Where documents lie, their statistics, and documents that splits or files have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.config.schema import SplitBy
from megatron.optimus.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.optimus.data.inspection import Duplicate, Statistics, document_at, document_offsets, find_duplicates


def pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def test_documents_and_their_lengths(tmp_path: Path) -> None:
    data = IndexedDataset(pair(tmp_path / "a", [[1, 2, 3], [], [4], [5, 6]]))
    assert document_offsets(data).tolist() == [0, 3, 3, 4, 6]
    assert [document_at(data, token) for token in range(6)] == [(0, 0)] * 3 + [(2, 3)] + [(3, 4)] * 2
    found = Statistics()
    assert found.quantiles() == {}
    found.add(data)
    found.add(IndexedDataset(pair(tmp_path / "b", [[7] * 101])))
    assert (found.documents, found.empty, found.tokens) == (5, 1, 107)
    assert found.quantiles() == {"min": 0, "p10": 0, "median": 2, "p90": 61, "p99": 97, "max": 101}
    pytest.importorskip("matplotlib")
    found.save_histogram(tmp_path / "lengths.png", "lengths")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_duplicates_of_splits_and_of_files(tmp_path: Path) -> None:
    """Ten tokens of a pair are for training, the last two for validation; element types do not matter."""
    a = pair(tmp_path / "a", [[1, 2], [3, 4, 5, 6], [1, 2], [], [7, 8], [1, 2]])
    b = pair(tmp_path / "b", [[7, 8], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9]], "int32")
    split = "10,2,0"
    across = list(find_duplicates([a, b], split, split_by=SplitBy.POSITION))
    assert across == [Duplicate((a, 0), (a, 5), ("train", "valid"))]
    every = list(find_duplicates([a, b], split, split_by=SplitBy.POSITION, across_splits=False))
    assert every == [
        Duplicate((a, 0), (a, 2), ("train", "train")),
        Duplicate((a, 0), (a, 5), ("train", "valid")),
        Duplicate((a, 4), (b, 0), ("train", "train")),
    ]
