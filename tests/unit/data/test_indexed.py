"""The .bin/.idx reader and writer: equal to megatron-core's byte for byte, and unmoved by damaged files."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import DTYPES, summarize_pair
from megatron.optimus.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype

FIXTURES = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


def flatten(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def write(prefix: Path, documents: list[list[list[int]]], dtype: Any = np.uint16) -> Path:
    """documents -> sequences -> tokens"""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(flatten(document), dtype=np.int64), [len(s) for s in document])
    return prefix


def pair_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "pair", [[[1, 2, 3]], [], [[4, 5], [6]]])


@pytest.mark.parametrize("batches", [[[3, 0, 1, 0], [], [0, 0], [2]], [[0], [0, 5]], [[70000, 1]]])
def test_many_documents_at_once_are_those_one_after_the_other(tmp_path: Path, batches: list[list[int]]) -> None:
    tokens = np.arange(sum(flatten(batches)), dtype=np.uint16)
    with IndexedDatasetWriter(tmp_path / "one", np.uint16) as one, IndexedDatasetWriter(tmp_path / "m", "<u2") as many:
        start = 0
        for lengths in batches:
            many.add_documents(tokens[start : start + sum(lengths)], lengths)
            for length in lengths:
                one.add_document(tokens[start : start + length])
                start += length
    assert pair_bytes(tmp_path / "m") == pair_bytes(tmp_path / "one")
    assert len(pair_bytes(tmp_path / "m")[0]) == 2 * tokens.size


def test_many_documents_at_once_must_fit_their_lengths_and_the_file(tmp_path: Path) -> None:
    tokens = np.arange(5, dtype=np.uint16)
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for lengths in ([5, 1], [4], [6, -1]):
            with pytest.raises(ValueError, match="not be negative and add up to the 5 tokens"):
                writer.add_documents(tokens, lengths)
        with pytest.raises(ValueError, match="which are int64 and must be uint16"):
            writer.add_documents(tokens.astype(np.int64), [5])
        writer.add_documents(tokens, [5])
    assert IndexedDataset(tmp_path / "x").get(0).tolist() == [0, 1, 2, 3, 4]


def damage(prefix: Path, offset: int, data: bytes) -> None:
    path = Path(f"{prefix}.idx")
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


@settings(max_examples=25, **FIXTURES)
@given(
    code=st.sampled_from(sorted(DTYPES)),
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=4), min_size=1, max_size=8).filter(
        lambda documents: any(any(document) for document in documents)
    ),  # megatron-core cannot map an empty .bin
)
def test_same_bytes_as_megatron_core_and_readable_both_ways(
    tmp_path: Path, code: int, documents: list[list[list[int]]]
) -> None:
    core = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    core_dtype = core.DType.dtype_from_code(code)
    write(ours, documents, DTYPES[code])
    builder = core.IndexedDatasetBuilder(f"{theirs}.bin", dtype=core_dtype)
    for document in documents:
        builder.add_document(torch.tensor(flatten(document), dtype=torch.int64), [len(s) for s in document])
    builder.finalize(f"{theirs}.idx")
    assert pair_bytes(ours) == pair_bytes(theirs)

    read_by_us, read_by_core = IndexedDataset(theirs), core.IndexedDataset(str(ours))
    sequences = flatten(documents)
    assert len(read_by_us) == len(read_by_core) == len(sequences)
    assert read_by_us.tokens_total == sum(map(len, sequences))
    np.testing.assert_array_equal(read_by_us.sizes, read_by_core.sequence_lengths)
    np.testing.assert_array_equal(read_by_us.document_index, read_by_core.document_indices)
    for i, sequence in enumerate(sequences):
        assert read_by_us.get(i).tolist() == read_by_core[i].tolist() == sequence
        assert read_by_us.get(i).dtype == core_dtype
        half = len(sequence) // 2
        assert read_by_us.get(i, half).tolist() == sequence[half:]
        assert read_by_us.get(i, 0, half).tolist() == sequence[:half]


def test_element_type_follows_the_vocabulary_as_in_megatron_core() -> None:
    core = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for vocab_size in (257, 50304, 65499, 65500, 65536, 200000):
        assert token_dtype(vocab_size) == np.dtype(core.DType.optimal_dtype(vocab_size))


def test_whole_pair_without_tokens(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "empty", [[], [[]]]))
    assert (len(data), data.tokens_total, data.document_index.tolist()) == (1, 0, [0, 0, 1])
    assert data.get(0).size == 0


def test_get_outside_a_sequence(prefix: Path) -> None:
    data = IndexedDataset(prefix)
    for arguments in ((3,), (-1,), (0, 1, 3), (0, -1, 1), (0, 4), (0, 0, -1)):
        with pytest.raises(IndexError):
            data.get(*arguments)
    with pytest.raises(ValueError, match="read-only"):
        data.get(0)[0] = 7


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"TNTIDX\0\0\0", "magic"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x00", "dtype code 0"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\x04", "pointer of sequence 1 is 6"),  # int32 instead of uint16
        (18, struct.pack("<Q", 4), "sequence count 4"),
        (18, struct.pack("<Q", 2**63), "sequence count"),
        (18, struct.pack("<Q", 2**64 - 1), "sequence count"),
        (26, struct.pack("<Q", 0), "document count is 0"),
        (26, struct.pack("<Q", 2**61), "document count"),
        (34, struct.pack("<i", -1), "sequence 0 has the negative length -1"),
        (34, struct.pack("<i", 4), "pointer of sequence 1"),
        (42, struct.pack("<i", 2**31 - 1), "truncated"),  # the last length: past the end of the .bin
        (46, struct.pack("<q", 2), "pointer of sequence 0 is 2"),
        (54, struct.pack("<q", -6), "pointer of sequence 1 is -6"),
        (62, struct.pack("<q", 2**62), "pointer of sequence 2"),
        (70, struct.pack("<q", 1), "first document bound is 1"),
        (78, struct.pack("<q", 2), "document bound 2 is 1, after 2"),
        (94, struct.pack("<q", 9), "last document bound is 9"),
    ],
)
def test_damaged_index(prefix: Path, offset: int, data: bytes, message: str) -> None:
    damage(prefix, offset, data)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(prefix) in str(caught.value)


def test_every_truncation_and_surplus(prefix: Path) -> None:
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match="truncated") as caught:
                IndexedDataset(prefix)
            assert str(path) in str(caught.value)
        path.write_bytes(whole + b"\0")
        with pytest.raises(DataError, match="too long"):
            IndexedDataset(prefix)
        path.write_bytes(whole)
    assert len(IndexedDataset(prefix)) == 3


def test_index_of_another_file_and_missing_files(prefix: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [[[1, 2, 3, 4]]])
    Path(f"{other}.idx").replace(f"{prefix}.idx")
    with pytest.raises(DataError, match=r"pair\.bin: too long.*belongs to another index"):
        IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"other\.idx: no such file"):
        IndexedDataset(other)
    with pytest.raises(DataError, match="give the prefix without"):
        IndexedDataset(f"{prefix}.bin")
    write(tmp_path / "mine_text_document", [[[1, 2]]])
    for read in (IndexedDataset, summarize_pair):
        with pytest.raises(DataError, match=r"mine\.idx: no such file; .*did you mean .*/mine_text_document\?$"):
            read(str(tmp_path / "mine"))


@settings(max_examples=150, **FIXTURES)
@given(flips=st.lists(st.tuples(st.integers(0, 101), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_never_crash_or_allocate(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    prefix = write(tmp_path / "pair", [[[1, 2, 3]], [], [[4, 5], [6]]])
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    assert len(raw) == 102
    for byte, bit in flips:
        raw[byte] ^= 1 << bit
    Path(f"{prefix}.idx").write_bytes(raw)
    tracemalloc.start()
    try:
        data = IndexedDataset(prefix)
        [data.get(i) for i in range(len(data))]
    except DataError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_checks_cross_chunk_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.optimus.data.indexed._CHUNK", 4)
    monkeypatch.setattr("megatron.optimus.data.index_reader._CHUNK_ENTRIES", 4)
    generator = np.random.default_rng(0)
    documents = [[generator.integers(0, 99, size).tolist()] for size in generator.integers(0, 6, 23)]
    prefix = write(tmp_path / "pair", documents)
    data = IndexedDataset(prefix)
    assert [data.get(i).tolist() for i in range(23)] == [document[0] for document in documents]
    data.check_token_ids(99)
    offset = 34 + 4 * 23 + 8 * 17  # the pointer of sequence 17
    damage(prefix, offset, b"\xff")
    with pytest.raises(DataError, match="pointer of sequence 17"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("dtype", "bad"), [(np.uint16, 500), (np.int32, 500), (np.int32, -3), (np.int64, 2**40)])
def test_token_ids_over_the_vocabulary(tmp_path: Path, dtype: Any, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.optimus.data.indexed._CHUNK", 8)
    prefix = write(tmp_path / "pair", [[[1, 2, 3] * 7], [[0, 499, bad, 499]]], dtype)
    with pytest.raises(DataError, match=rf"pair\.bin: token 23 has id {bad}, outside the vocabulary of 500"):
        IndexedDataset(prefix).check_token_ids(500)
    if bad > 0:
        IndexedDataset(prefix).check_token_ids(bad + 1)


def test_float_files_hold_no_token_ids(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float32"):
        IndexedDataset(write(tmp_path / "pair", [[[1]]], np.float32)).check_token_ids(10)


def test_writer_refuses_what_would_wrap_around(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token id 65536 does not fit uint16"):
        write(tmp_path / "pair", [[[1, 65536]]])
    with pytest.raises(DataError, match="token id -1 does not fit"):
        write(tmp_path / "pair", [[[-1]]])
    with pytest.raises(DataError, match="dtype"), IndexedDatasetWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document(np.array([1.5]))
    with pytest.raises(DataError, match="no code"):
        IndexedDatasetWriter(tmp_path / "pair", np.complex64)
    with pytest.raises(ValueError, match="add up"), IndexedDatasetWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document([1, 2, 3], [2])
    assert list(tmp_path.iterdir()) == []


def test_failed_writer_keeps_the_earlier_pair(prefix: Path, tmp_path: Path) -> None:
    before = pair_bytes(prefix)
    with pytest.raises(RuntimeError), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([7] * 100_000)
        raise RuntimeError
    assert pair_bytes(prefix) == before
    assert len(list(tmp_path.iterdir())) == 2
    write(prefix, [[[9]]])
    assert IndexedDataset(prefix).get(0).tolist() == [9]
