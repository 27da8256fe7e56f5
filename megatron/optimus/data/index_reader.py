"""The .idx file of Megatron's indexed datasets: its format, reading entries of it, and checking them.

Everything is little-endian and unpadded. With S sequences and D document bounds the file holds

    bytes  content
    9      magic "MMIDIDX\\0\\0"
    8      uint64 version, 1
    1      uint8 dtype code of the .bin file (``DTYPES``)
    8      uint64 S
    8      uint64 D
    4 S    int32 tokens of each sequence
    8 S    int64 byte offset of each sequence in the .bin file
    8 D    int64 document bounds: document d holds sequences [bounds[d], bounds[d+1]); the first is 0, the last is S
    S      int8 mode of each sequence; only in multimodal files, ignored here

The index of a large corpus has hundreds of megabytes, so it is neither mapped nor read whole: entries are read by
``pread``. As they ascend, the first sequence of a range of tokens is found by interpolation, a page at a time (usually
two to four pages, at most twice as many as bisection needs).
"""

from __future__ import annotations

import glob
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.splits import NO_HASH_SPLITS, HashSplits

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
HEADER = struct.Struct("<9sQBQQ")

_PAGE_ENTRIES = 512  # of 8 bytes: one page, read at each step of a search
_CHUNK_ENTRIES = 1 << 16  # read together elsewhere: bounds the memory, whatever the counts say
# compared together: arrays of 64 KiB, as the page faults of larger ones take most of the time
_COMPARED_ENTRIES = 1 << 13
_NUM_SPREAD_CHUNKS = 8  # looked at of a file that is too large to be checked whole

Entries = npt.NDArray[np.int64]


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the pair's .bin file."""
    return Path(f"{os.fspath(prefix)}.bin")


def tokenizer_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of the file beside a pair that says which tokenizer made it."""
    return Path(f"{os.fspath(prefix)}.tokenizer")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Path of the pair's .idx file."""
    return Path(f"{os.fspath(prefix)}.idx")


def no_such_file(path: Path) -> DataError:
    """Makes the error for a missing file of a pair, which suggests pairs whose names begin with the given prefix."""
    near = sorted(str(other.with_suffix("")) for other in path.parent.glob(glob.escape(path.stem) + "_*.idx"))
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else ", of a pair that `optimus preprocess` has written"
    return DataError(f"{path}: no such file; give the prefix without .bin or .idx{hint}")


class Header(NamedTuple):
    """Header of an .idx file whose counts agree with the file's size."""

    code: int  # key of DTYPES
    sequences: int
    documents: int  # number of document bounds, one more than documents


def parse_header(path: str | os.PathLike[str], raw: bytes, size: int) -> Header:
    """Parses the header of an .idx file and compares its counts with the file's size.

    Args:
        path: named in errors
        raw: the first bytes of the file, at least the header
        size: bytes of the whole file

    Raises:
        DataError: the file is no .idx file, is of an unknown version or element type, or has another size.
    """
    if size < HEADER.size or len(raw) < HEADER.size:
        raise DataError(f"{path}: truncated: {size} bytes, the header alone has {HEADER.size}")
    magic, version, code, sequences, documents = HEADER.unpack(raw)
    if magic != MAGIC:
        raise DataError(f"{path}: wrong magic {magic!r}, expected {MAGIC!r}; this is no Megatron .idx file")
    if version != VERSION:
        raise DataError(f"{path}: version {version} is not supported, only {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path}: unknown dtype code {code}, expected one of {sorted(DTYPES)}")
    if documents < 1:
        raise DataError(f"{path}: document count is 0; even an empty file has the bound 0")
    # Python integers: no count can overflow or make anyone allocate
    needed = HEADER.size + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):  # the latter: with modes
        kind = "truncated" if size < needed else "too long"
        raise DataError(
            f"{path}: {kind}: sequence count {sequences} and document count {documents} need {needed} bytes, "
            f"the file has {size}; write it again"
        )
    return Header(code, sequences, documents)


class IndexReader:
    """Reads and checks entries of one .idx file. A context manager, which closes the file.

    Attributes:
        path: path of the .idx file
        header: the file's header, which agrees with its size
        dtype: element type of the .bin file

    Raises:
        DataError: the file is no index, or its size does not agree with its header.
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not block
        try:
            status = os.fstat(self._descriptor)
            check_is_regular(path, status)
            self.header = parse_header(path, os.pread(self._descriptor, HEADER.size, 0), status.st_size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.dtype = DTYPES[self.header.code]

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def lengths(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Reads the tokens of sequences [first, first + count): int32 [count]."""
        return self._read("<i4", HEADER.size, first, count)

    def offsets(self, first: int, count: int) -> Entries:
        """Reads the byte offsets, in the .bin file, of sequences [first, first + count): int64 [count]."""
        return self._read("<i8", HEADER.size + 4 * self.header.sequences, first, count)

    def document_bounds(self, first: int, count: int) -> Entries:
        """Reads document bounds [first, first + count), which are numbers of sequences: int64 [count]."""
        return self._read("<i8", HEADER.size + 12 * self.header.sequences, first, count)

    def check_document_ends(self) -> None:
        """Raises DataError unless the first document begins, and the last ends, with the sequences."""
        first, last = int(self.document_bounds(0, 1)[0]), int(self.document_bounds(self.header.documents - 1, 1)[0])
        if first != 0:
            raise DataError(f"{self.path}: first document bound is {first}, expected 0")
        if last != self.header.sequences:
            raise DataError(
                f"{self.path}: last document bound is {last}, expected {self.header.sequences} (sequence count)"
            )

    def check_bin_size(self, bin_path: str | os.PathLike[str], bin_size: int) -> None:
        """Raises DataError unless the last sequence ends where the .bin file of ``bin_size`` bytes does."""
        described = self._end_of_last_sequence()
        if described != bin_size:
            kind = "truncated" if described > bin_size else "too long"
            raise DataError(
                f"{bin_path}: {kind}: {os.path.basename(self.path)} describes {described} bytes of {self.dtype.name}, "
                f"the file has {bin_size}; it is incomplete or belongs to another index, write the pair again"
            )

    def check_lengths(self) -> None:
        """Reads all lengths. Raises DataError unless they are not negative and add up to the end of the last sequence.

        That is a fifth of the bytes of the index, and a tenth of the time that ``check_entries`` takes.
        """
        total = 0
        for first in range(0, self.header.sequences, _CHUNK_ENTRIES):
            lengths = self.lengths(first, min(_CHUNK_ENTRIES, self.header.sequences - first))
            self._check_not_negative(first, lengths)
            total += int(lengths.sum(dtype=np.int64))
        end = self._end_of_last_sequence()
        if total * self.dtype.itemsize != end:
            raise DataError(
                f"{self.path}: the lengths of its {self.header.sequences} sequences add up to "
                f"{total * self.dtype.itemsize} bytes, the last of them ends at byte {end}; the index is damaged, "
                "write it again"
            )

    def check_entries(self, max_entries: int | None = None) -> None:
        """Compares entries with their neighbours.

        Lengths must not be negative, each sequence must begin where the one before it ends, and document bounds must
        ascend and lie within the sequences.

        Args:
            max_entries: of a file with more sequences or documents, only evenly spread ranges are read; None: all

        Raises:
            DataError: an entry is wrong; names file, field and number.
        """
        sequences, documents = self.header.sequences, self.header.documents
        for first, count in spread_ranges(sequences, max_entries or sequences, _CHUNK_ENTRIES):
            lengths, offsets = self.lengths(first, count), self.offsets(first, min(count + 1, sequences - first))
            for at in range(0, count, _COMPARED_ENTRIES):
                stop = at + _COMPARED_ENTRIES
                self._check_sequences(first + at, lengths[at:stop], offsets[at : stop + 1])
        for first, count in spread_ranges(documents, max_entries or documents, _CHUNK_ENTRIES):
            self._check_document_bounds(first, count)

    def _check_sequences(self, first: int, lengths: npt.NDArray[np.int32], offsets: Entries) -> None:
        """Checks sequences from number ``first`` on; ``offsets`` has the following sequence's too, if there is one."""
        self._check_not_negative(first, lengths)
        if first == 0 and offsets[0] != 0:
            raise DataError(f"{self.path}: pointer of sequence 0 is {offsets[0]}, expected 0")
        wrong = offsets[1:] != offsets[:-1] + lengths[: offsets.size - 1].astype(np.int64) * self.dtype.itemsize
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise DataError(
                f"{self.path}: pointer of sequence {first + bad + 1} is {offsets[bad + 1]}, but the one before begins "
                f"at {offsets[bad]} and has {lengths[bad]} tokens; the index is damaged, write it again"
            )

    def _check_document_bounds(self, first: int, count: int) -> None:
        bounds = self.document_bounds(first, min(count + 1, self.header.documents - first))
        if bounds[0] >= 0 and bounds[-1] <= self.header.sequences and (bounds[1:] >= bounds[:-1]).all():
            return
        wrong = (bounds < 0) | (bounds > self.header.sequences)
        wrong[1:] |= bounds[1:] < bounds[:-1]
        bad = int(np.argmax(wrong))
        before = f", after {bounds[bad - 1]}" if bad else ""
        raise DataError(
            f"{self.path}: document bound {first + bad} is {bounds[bad]}{before}, of {self.header.sequences} "
            "sequences; the index is damaged, write it again"
        )

    def _check_not_negative(self, first: int, lengths: npt.NDArray[np.integer]) -> None:
        if int(lengths.min()) < 0:
            bad = int(np.argmax(lengths < 0))
            raise DataError(f"{self.path}: sequence {first + bad} has the negative length {lengths[bad]}")

    def _end_of_last_sequence(self) -> int:
        """Byte of the .bin file at which the last sequence ends."""
        if not self.header.sequences:
            return 0
        last = self.header.sequences - 1
        length = self.lengths(last, 1)
        self._check_not_negative(last, length)
        return int(self.offsets(last, 1)[0]) + int(length[0]) * self.dtype.itemsize

    def _read(self, dtype: str, array_start: int, first: int, count: int) -> npt.NDArray[Any]:
        width = np.dtype(dtype).itemsize
        data = os.pread(self._descriptor, width * count, array_start + width * first)
        if len(data) < width * count:
            raise DataError(
                f"{self.path}: has been cut to {os.fstat(self._descriptor).st_size} bytes while it was read; restore it"
            )
        return np.frombuffer(data, dtype)


class PairSummary(NamedTuple):
    """Element type and size of a .bin/.idx pair."""

    code: int  # key of DTYPES
    tokens: int
    fingerprint: int = 0  # see fingerprint.py; 0: not known
    splits: HashSplits = NO_HASH_SPLITS


def summarize_pair(prefix: str) -> PairSummary:
    """Reads the header and the last entries of a pair's index: about eight system calls, whatever its size.

    Raises:
        DataError: a file is missing, truncated or foreign, or the two do not belong together; names file and field.
    """
    idx, bin_ = str(idx_path(prefix)), str(bin_path(prefix))
    try:
        with IndexReader(idx) as index:
            status = os.stat(bin_)
            check_is_regular(bin_, status)
            index.check_document_ends()
            index.check_bin_size(bin_, status.st_size)
            return PairSummary(index.header.code, status.st_size // index.dtype.itemsize)
    except FileNotFoundError as error:
        raise no_such_file(Path(error.filename)) from error
    except OSError as error:
        raise DataError(f"{error.filename or idx}: cannot be read: {error.strerror}") from error


def check_is_regular(path: str, status: os.stat_result) -> None:
    """Raises DataError unless the file is a regular one: a pipe or folder of that name holds no tokens."""
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is no regular file; give the prefix of a .bin/.idx pair")


def check_indices(paths: Sequence[str], max_entries: int, max_lengths: int) -> None:
    """Checks entries of .idx files before a run, so that a damaged one does not end it hours later.

    Args:
        paths: .idx files, whose first and last entries ``summarize_pair`` has checked
        max_entries: sequences and documents to read over all files; beyond that each is read in evenly spread ranges
        max_lengths: sequences up to which the lengths of all are read where the other entries are not

    Raises:
        DataError: a file cannot be read or an entry is wrong; names file, field and number.
    """
    counts = []
    for path in paths:
        with _open_known_file(path) as index:
            counts.append(max(index.header.sequences, index.header.documents))
    budgets = share_by_size(counts, max_entries, 512)
    for path, count, budget in zip(paths, counts, budgets, strict=True):
        with _open_known_file(path) as index:
            if budget < count and sum(counts) <= max_lengths:
                index.check_lengths()
            index.check_entries(budget)


def share_by_size(counts: Sequence[int], budget: int, least: int) -> list[int]:
    """Number of entries to look at in each file: all if the budget has room for that, else in proportion to its size.

    Args:
        counts: entries of each file
        budget: entries to look at in all files together
        least: entries to look at in each file at least
    """
    total = sum(counts)
    return [count if total <= budget else max(least, budget * count // total) for count in counts]


def spread_ranges(total: int, budget: int, largest: int) -> list[tuple[int, int]]:
    """(start, count) of the ranges of entries to look at: all of them, or ranges spread evenly over the file.

    Args:
        total: entries of the file
        budget: entries to look at; if ``total`` is larger, eight ranges of that many together are returned
        largest: most entries in a range
    """
    if total <= budget:
        return [(start, min(largest, total - start)) for start in range(0, total, largest)]
    size = min(largest, budget // _NUM_SPREAD_CHUNKS)
    return [((total - size) * i // (_NUM_SPREAD_CHUNKS - 1), size) for i in range(_NUM_SPREAD_CHUNKS)]


def document_starts(path: str, start: int, stop: int) -> Entries:
    """Finds the first tokens of the documents that begin in a range of tokens.

    Args:
        path: .idx file
        start: first token of the range
        stop: end of the range, at most the tokens of the file

    Returns:
        Token numbers in [start, stop), int64, ascending, without those of empty documents.

    Raises:
        DataError: the file cannot be read, is no index, or is damaged.
    """
    with _open_known_file(path) as index:
        sequences, documents, itemsize = index.header.sequences, index.header.documents, index.dtype.itemsize
        first = _first_at_least(index.offsets, sequences, start * itemsize)
        offsets = _read_below(index.offsets, first, sequences, stop * itemsize)
        first_document = _first_at_least(index.document_bounds, documents, first)
        bounds = _read_below(index.document_bounds, first_document, documents, first + offsets.size) - first
    falls = (offsets[1:] < offsets[:-1]).any() or (bounds[1:] < bounds[:-1]).any()  # differences could overflow
    if falls or (bounds.size and (bounds[0] < 0 or bounds[-1] >= offsets.size)):
        raise DataError(f"{path}: offsets or document bounds do not ascend: the index is damaged, write it again")
    return np.unique(offsets[bounds] // itemsize)  # a document without tokens begins where the next one does


@contextmanager
def _open_known_file(path: str) -> Iterator[IndexReader]:
    """Opens an .idx file that was there when the run started. Raises DataError."""
    try:
        with IndexReader(path) as index:
            yield index
    except OSError as error:
        raise DataError(f"{path}: cannot be read any more ({error.strerror}): restore it and resume") from error


def _first_at_least(read: Callable[[int, int], Entries], count: int, target: int) -> int:
    """Number of the first of ``count`` ascending entries that is ``target`` or more; ``count`` if none is."""
    low, high = 0, count  # entries before low are below the target, those from high on are not
    low_value, high_value = 0, int(read(count - 1, 1)[0]) if count else 0
    by_value = True  # alternates with bisection, which bounds the number of steps
    while low < high:
        fraction = (target - low_value) / (high_value - low_value) if by_value and high_value > low_value else 0.5
        guess = low + int((high - low) * min(1.0, max(0.0, fraction)))
        first = max(low, min(guess - _PAGE_ENTRIES // 2, high - _PAGE_ENTRIES))
        page = read(first, min(_PAGE_ENTRIES, high - first))
        if page[-1] < target:
            low, low_value = first + page.size, int(page[-1])
        elif page[0] >= target:
            high, high_value = first, int(page[0])
        else:
            return first + int(np.searchsorted(page, target))
        by_value = not by_value
    return low


def _read_below(read: Callable[[int, int], Entries], first: int, count: int, limit: int) -> Entries:
    """Ascending entries [first, ...), of ``count`` in all, up to the first that is ``limit`` or more."""
    found = []
    size = _PAGE_ENTRIES
    while first < count:
        entries = read(first, min(size, count - first))
        end = int(np.searchsorted(entries, limit))
        found.append(entries[:end])
        if end < entries.size:
            break
        first, size = first + entries.size, _CHUNK_ENTRIES
    return np.concatenate(found) if found else np.empty(0, np.int64)
