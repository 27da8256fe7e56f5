"""Reading entries of .idx files: where documents begin, and what the checks before a run find."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.optimus.data import index_reader as module
from megatron.optimus.data.dataset import (
    check_contents,
)
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import IndexReader, document_starts, summarize_pair
from megatron.optimus.data.indexed import IndexedDataset, IndexedDatasetWriter


def write(prefix: Path, documents: list[list[int]], seed: int = 0) -> str:
    """Documents of random tokens that end with 0, each of sequences of the given lengths."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for lengths in documents:
            tokens = rng.integers(1, 900, sum(lengths))
            tokens[-1:] = 0
            writer.add_document(tokens, lengths)
    return str(prefix)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_starts_of_documents_equal_the_whole_index(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Empty documents and sequences, several sequences a document; pages of two entries, so that searches are long."""
    lengths = st.lists(st.sampled_from([0, 1, 2, 3, 50]), max_size=3)
    documents = data.draw(st.lists(lengths, min_size=1, max_size=60))
    prefix = write(tmp_path_factory.mktemp("starts") / "x", documents)
    ends = np.cumsum([0, *(sum(own) for own in documents)])
    expected = sorted({int(a) for a, b in itertools.pairwise(ends) if a < b})
    total = int(ends[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAGE_ENTRIES", data.draw(st.sampled_from([1, 2, 512])))
        patch.setattr(module, "_CHUNK_ENTRIES", 3)
        for _ in range(5):
            start = data.draw(st.integers(0, total))
            stop = data.draw(st.integers(start, total))
            found = document_starts(f"{prefix}.idx", start, stop).tolist()
            assert found == [token for token in expected if start <= token < stop]


def test_starts_cost_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "many", [[int(n)] for n in np.random.default_rng(0).geometric(0.02, 100_000)])
    reads: list[int] = []
    read = IndexReader._read
    monkeypatch.setattr(IndexReader, "_read", lambda *args: (reads.append(args[-1]), read(*args))[1])
    for start in range(0, 5_000_000, 250_000):
        document_starts(f"{prefix}.idx", start, start + 2000)
    assert len(reads) <= 20 * 10 and sum(reads) <= 20 * 5000  # of 200,000 entries


@settings(max_examples=100, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(34, 34 + 20 * 40 + 7), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_index_ends(tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]) -> None:
    """No crash, hang or foreign error whatever the entries are: starts within the stretch's sequences, or DataError."""
    folder = tmp_path_factory.mktemp("flipped")
    path = Path(write(folder / "x", [[5]] * 40) + ".idx")
    raw = bytearray(path.read_bytes())
    for place, value in flips:
        raw[place] = value
    path.write_bytes(raw)
    try:
        found = document_starts(str(path), 20, 90)
    except DataError:
        return
    assert found.size <= 41 and (np.diff(found) > 0).all()


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.timeout(20)
def test_pipes_and_folders_are_no_token_files(tmp_path: Path, suffix: str) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    prefix = write(tmp_path / "f", [[5]] * 4)
    for make in (os.mkfifo, os.mkdir):
        Path(prefix + suffix).unlink(missing_ok=True)
        make(prefix + suffix)
        with pytest.raises(DataError, match=rf"f\{suffix}: is no regular file"):
            summarize_pair(prefix)


DAMAGE = st.one_of(
    st.binary(min_size=1, max_size=1),
    st.binary(min_size=8, max_size=8),
    st.sampled_from([(-(2**63)).to_bytes(8, "little", signed=True), (2**62).to_bytes(8, "little"), b"\xff" * 8]),
)


@settings(max_examples=250, deadline=None)
@example(  # bounds 38 and 39 of 41, whose difference overflows
    changes=[
        (34 + 12 * 26 + 8 * 38, (3 << 61).to_bytes(8, "little")),
        (34 + 12 * 26 + 8 * 39, (5 << 61).to_bytes(8, "little")),
    ]
)
@given(changes=st.lists(st.tuples(st.integers(34, 34 + 20 * 40 + 7), DAMAGE), min_size=1, max_size=4))
def test_small_indices_are_checked_whole_before_the_run(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    """By the full check of `optimus inspect-data` and before a run; neither refuses a sound one."""
    prefix = str(tmp_path_factory.mktemp("changed") / "f")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(40):
            writer.add_document(np.arange(i % 3))  # a third of the documents are empty
    size, path = os.path.getsize(f"{prefix}.idx"), Path(f"{prefix}.idx")
    raw = bytearray(path.read_bytes())
    for place, value in changes:
        at = min(place, size - len(value))
        raw[at : at + len(value)] = value
    path.write_bytes(raw)
    for start, stop in ((0, 39), (7, 30)):
        with contextlib.suppress(DataError):
            starts = document_starts(str(path), start, stop)
            assert ((starts >= start) & (starts < stop)).all()
    if is_sound(path):
        IndexedDataset(prefix)
        check_contents([prefix], 10)
        return
    for read in (IndexedDataset, lambda prefix: check_contents([prefix], 10)):
        with pytest.raises(DataError, match=rf"{prefix}\.(idx|bin): "):
            read(prefix)


def is_sound(path: Path) -> bool:
    """Whether the entries of an index of 26 sequences and 40 documents are right, by their definition."""
    raw = path.read_bytes()
    lengths, offsets, bounds = (
        np.frombuffer(raw, dtype, count, start).tolist()
        for dtype, count, start in (("<i4", 26, 34), ("<i8", 26, 34 + 4 * 26), ("<i8", 41, 34 + 12 * 26))
    )
    expected = [2 * sum(lengths[:i]) for i in range(27)]
    ascending = all(low <= high for low, high in itertools.pairwise(bounds))
    return (
        min(lengths) >= 0
        and [*offsets, path.with_suffix(".bin").stat().st_size] == expected
        and ascending
        and (bounds[0], bounds[-1]) == (0, 26)
    )


def test_what_is_wrong_inside_an_index_is_named(tmp_path: Path) -> None:
    prefix, documents = str(tmp_path / "f"), 3000
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(np.arange(5))
    path = Path(f"{prefix}.idx")
    raw = path.read_bytes()
    at = {"length": 34, "pointer": 34 + 4 * documents, "bound": 34 + 12 * documents}
    cases = [
        ("length", 4, 7, -5, "sequence 7 has the negative length -5"),
        ("length", 4, 7, 6, "pointer of sequence 8 is 80, but the one before begins at 70 and has 6 tokens"),
        ("pointer", 8, 0, 2, "pointer of sequence 0 is 2, expected 0"),
        ("pointer", 8, 2999, 7, "pointer of sequence 2999 is 7|truncated|too long"),
        ("bound", 8, 9, 2, "document bound 9 is 2, after 8, of 3000 sequences"),
        ("bound", 8, 9, 3001, "document bound 9 is 3001, after 8, of 3000 sequences"),
    ]
    for field, width, number, value, message in cases:
        place = at[field] + width * number
        path.write_bytes(raw[:place] + value.to_bytes(width, "little", signed=True) + raw[place + width :])
        with pytest.raises(DataError, match=message):
            check_contents([prefix], 10)
    few = {"max_entries": 512, "max_lengths": 512}
    for first, found in ((1300, True), (1400, False)):  # of a large index 8 pieces: here of 64 entries of 3,000
        place = at["length"] + 4 * first
        path.write_bytes(raw[:place] + b"\xff" * (4 * 100) + raw[place + 4 * 100 :])
        with pytest.raises(DataError, match=f"sequence {first} has the negative length -1"):
            check_contents([prefix], 10)
        if found:
            with pytest.raises(DataError, match=f"sequence {first} has the negative length -1"):
                check_contents([prefix], 10, **few)
        else:
            check_contents([prefix], 10, **few)
        # all lengths, where offsets and bounds are too many
        with pytest.raises(DataError, match=f"sequence {first} has the negative length -1"):
            check_contents([prefix], 10, max_entries=512)
    path.write_bytes(raw[: 34 + 4 * 1400] + (7).to_bytes(4, "little") + raw[34 + 4 * 1401 :])
    check_contents([prefix], 10, **few)
    with pytest.raises(DataError, match=r"f\.idx: the lengths of its 3000 sequences add up to 30004 bytes, .* 30000;"):
        check_contents([prefix], 10, max_entries=512)


def test_what_is_looked_at_is_shared_out_by_size(tmp_path: Path) -> None:
    """A large file beside small ones is read whole if all of them together are few entries."""
    prefixes = [str(tmp_path / name) for name in ("small", "large")]
    for prefix, documents in zip(prefixes, (10, 900), strict=True):
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(documents):
                writer.add_document(np.arange(5))
    path = Path(f"{prefixes[1]}.idx")
    raw = path.read_bytes()
    place = 34 + 12 * 900 + 8 * 200  # a bound between the pieces of 64 that 8 x 64 entries would be
    path.write_bytes(raw[:place] + (2).to_bytes(8, "little") + raw[place + 8 :])
    with pytest.raises(DataError, match=r"large\.idx: document bound 200 is 2, after 199"):
        check_contents(prefixes, 10, max_entries=912)
    check_contents(prefixes, 10, max_entries=512)


def test_an_index_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    """The file is looked at when it is opened, and may be cut before an entry is read."""
    path = f"{write(tmp_path / 'cut', [[3], [5], [2]])}.idx"
    with IndexReader(path) as index:
        os.truncate(path, 40)
        for read in (index.lengths, index.offsets, index.document_bounds):
            with pytest.raises(DataError, match=r"cut\.idx: has been cut to 40 bytes while it was read; restore it"):
                read(0, 3)
