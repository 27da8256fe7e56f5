"""Thousands of token files as one numbered list: checked by their headers, read on demand.

Nothing is built at the start. A pair costs its header, the last entries of its index and the sizes of both files:
about eight system calls, whatever its length. Each rank looks at its share of the pairs and tells the others
(``open_together``): were every rank to open every file, 12,288 ranks with 20,000 pairs would ask the one server of a
parallel file system half a billion times. That is enough to know how many tokens it has and to notice a truncated,
swapped or foreign half. The inside of an index is not read (training needs none of it); ``IndexedDataset`` checks all.

Tokens are read with ``pread`` and not through memory maps, for three reasons. A file that is cut short under a map
kills the process with SIGBUS; a read that comes back short is an error one can report. A page fault in a map reads
ahead by the device's window (128 KiB by default), sixteen times what a sample of 4,096 two-byte tokens needs; with
POSIX_FADV_RANDOM a read fetches its own pages only. And a map of a 100 TB corpus costs page tables. At most
``MAX_OPEN`` files are open at a time, the least recently used one is closed first.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import document_starts
from megatron.optimus.data.indexed import DTYPES, HEADER_SIZE, bin_path, idx_path, no_such_file, parse_header

if TYPE_CHECKING:
    from megatron.optimus.platform.ranks import Ranks  # torch, which tools over files do without

MAX_OPEN = 128  # well below the usual limit of 1,024 descriptors of a process
_THREADS = 8  # headers on a parallel file system cost a round trip each
_PER_TASK = 64


class PairSummary(NamedTuple):
    """What a header tells about a pair."""

    code: int  # key of DTYPES
    tokens: int


def summarize_pair(prefix: str) -> PairSummary:
    """Reads the header and the ends of the index of one pair. Raises DataError, naming file and field."""
    idx, bin_ = str(idx_path(prefix)), str(bin_path(prefix))
    try:
        descriptor = os.open(idx, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe of that name must not block
        try:
            found, own = os.stat(bin_), os.fstat(descriptor)
            for path, mode in ((idx, own.st_mode), (bin_, found.st_mode)):
                if not stat.S_ISREG(mode):
                    raise DataError(f"{path}: is no regular file; give the prefix of a .bin/.idx pair")
            bin_size, size = found.st_size, own.st_size
            header = parse_header(idx, os.pread(descriptor, HEADER_SIZE, 0), size)
            ends = _IndexEnds(descriptor, header.sequences, header.documents)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise no_such_file(Path(error.filename)) from error
    except OSError as error:
        raise DataError(f"{error.filename or idx}: cannot be read: {error.strerror}") from error
    itemsize = DTYPES[header.code].itemsize
    if ends.first_bound != 0:
        raise DataError(f"{idx}: first document bound is {ends.first_bound}, expected 0")
    if ends.last_bound != header.sequences:
        raise DataError(f"{idx}: last document bound is {ends.last_bound}, expected {header.sequences}")
    if ends.last_length < 0:
        raise DataError(f"{idx}: sequence {header.sequences - 1} has the negative length {ends.last_length}")
    described = ends.last_pointer + ends.last_length * itemsize
    if described != bin_size:
        kind = "truncated" if described > bin_size else "too long"
        raise DataError(
            f"{bin_}: {kind}: {os.path.basename(idx)} describes {described} bytes of {DTYPES[header.code].name}, the "
            f"file has {bin_size}; it is incomplete or belongs to another index, write the pair again"
        )
    return PairSummary(header.code, bin_size // itemsize)


class _IndexEnds:
    """First and last entries of the arrays of an open .idx file, whose size has been checked against its counts."""

    def __init__(self, descriptor: int, sequences: int, documents: int) -> None:
        def integer(size: int, offset: int) -> int:
            return int.from_bytes(os.pread(descriptor, size, offset), "little", signed=True)

        bounds = HEADER_SIZE + 12 * sequences
        self.first_bound = integer(8, bounds)
        self.last_bound = integer(8, bounds + 8 * (documents - 1))
        self.last_length = integer(4, HEADER_SIZE + 4 * (sequences - 1)) if sequences else 0
        self.last_pointer = integer(8, bounds - 8) if sequences else 0


def summarize(prefixes: Sequence[str]) -> list[PairSummary]:
    """``summarize_pair`` of each."""
    if len(prefixes) <= _PER_TASK:
        return [summarize_pair(prefix) for prefix in prefixes]
    shares = [prefixes[i : i + _PER_TASK] for i in range(0, len(prefixes), _PER_TASK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="optimus-headers") as pool:
        parts = pool.map(lambda share: [summarize_pair(prefix) for prefix in share], shares)
        return [summary for part in parts for summary in part]


def open_together(prefixes: Sequence[str], ranks: Ranks) -> TokenFiles:
    """The same files on every rank, each of which has looked at its share of them. Collective.

    Raises DataError on every rank if any pair cannot be used, or if the ranks do not have the same list: on a file
    system that is slow to show new files a glob may find other ones on other nodes.
    """
    digest = xxhash.xxh3_64_intdigest("\n".join(prefixes).encode()) >> 1
    [first] = ranks.broadcast([digest])

    def look() -> list[PairSummary]:
        if digest != first:
            raise DataError(f"finds other files ({len(prefixes)}) than rank 0; name them in one list, or start again")
        return summarize(prefixes[ranks.rank :: ranks.size])

    own = ranks.run_on_all_ranks(look, "opening the data", DataError)
    summaries = [PairSummary(0, 0)] * len(prefixes)
    for rank, data in enumerate(ranks.all_gather_bytes(np.array(own, dtype=np.int64).tobytes())):
        pairs = np.frombuffer(data, np.int64).reshape(-1, 2).tolist()
        summaries[rank :: ranks.size] = [PairSummary(*pair) for pair in pairs]
    return TokenFiles(prefixes, summaries=summaries)


class TokenFiles:
    """Pairs numbered from 0, open to reading from any thread.

    Attributes:
        prefixes: paths without suffix
        tokens: int64 [files], tokens of each pair
        codes: uint8 [files], dtype code of each pair (``indexed.DTYPES``)

    ``summaries`` are those of the pairs, if they are known already.

    Raises DataError if a pair is missing, truncated, does not belong together, or holds floats.
    """

    def __init__(
        self, prefixes: Sequence[str], *, summaries: Sequence[PairSummary] | None = None, max_open: int = MAX_OPEN
    ) -> None:
        self.prefixes = list(prefixes)
        self.number = {prefix: i for i, prefix in enumerate(self.prefixes)}
        self._max_open = max_open
        self._open: OrderedDict[int, int] = OrderedDict()  # file number -> descriptor, least recently used first
        self._lock = threading.Lock()
        summaries = summarize(self.prefixes) if summaries is None else summaries
        self.tokens = np.array([summary.tokens for summary in summaries], dtype=np.int64)
        self.codes = np.array([summary.code for summary in summaries], dtype=np.uint8)
        for prefix, code in zip(self.prefixes, self.codes, strict=True):
            if DTYPES[code].kind == "f":
                raise DataError(f"{prefix}.idx: dtype code says {DTYPES[code].name}; token ids must be integers")

    def __len__(self) -> int:
        return len(self.prefixes)

    def read(self, file: int, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [start, start + count) of a file, in the file's element type.

        Raises DataError if the file has disappeared, been cut or grown since the start.
        """
        dtype = DTYPES[self.codes[file]]
        with self._lock:
            data = self._read_bytes(file, start * dtype.itemsize, count * dtype.itemsize)
        return np.frombuffer(data, dtype)

    def document_starts(self, file: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """First tokens, in [start, stop), of the documents of a file: int64, ascending. Raises DataError."""
        return document_starts(f"{self.prefixes[file]}.idx", DTYPES[self.codes[file]].itemsize, start, stop)

    def close(self) -> None:
        """Closes what is open; reading opens files again."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # not when the constructor failed
            self.close()

    def _read_bytes(self, file: int, offset: int, count: int) -> bytes:
        path = f"{self.prefixes[file]}.bin"
        try:
            descriptor = self._descriptor(file, path)
            found = os.fstat(descriptor)
            if not found.st_nlink and os.stat(path).st_ino != found.st_ino:  # raises if nothing took its place
                raise DataError(
                    f"{path}: has been replaced since the run started; token files must not change under a run: "
                    "restore it and resume"
                )
            size = found.st_size
            data = os.pread(descriptor, count, offset)
            while len(data) < count and (more := os.pread(descriptor, count - len(data), offset + len(data))):
                data += more
        except PermissionError as error:
            raise DataError(f"{path}: {error.strerror}; give this user the right to read it") from error
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read any more ({error.strerror}); it was there when the run started: restore it "
                "and resume"
            ) from error
        expected = int(self.tokens[file]) * DTYPES[self.codes[file]].itemsize
        if size != expected or len(data) < count:
            what = "shrunk" if size < expected else "grown"
            raise DataError(
                f"{path}: has {what} from {expected} to {size} bytes since the run started; token files must not "
                "change under a run: restore it and resume"
            )
        return data

    def _descriptor(self, file: int, path: str) -> int:
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            while len(self._open) >= self._max_open:
                os.close(self._open.popitem(last=False)[1])
            descriptor = os.open(path, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._open[file] = descriptor
        return descriptor
