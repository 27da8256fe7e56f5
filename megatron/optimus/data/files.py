"""Thousands of token files as one numbered list, checked by their headers and read on demand.

Nothing is built at the start. A pair costs its header, the last entries of its index and the sizes of both files: about
eight system calls, whatever its length. That is enough to know how many tokens it has and to notice a truncated,
swapped or foreign half. Each rank looks at its share of the pairs and sends the others what it found
(``open_on_all_ranks``): were every rank to open every file, 12,288 ranks with 20,000 pairs would ask the one server of
a parallel file system half a billion times. The inside of an index is not read here; ``IndexedDataset`` checks all.

Tokens are read with ``pread`` and not through memory maps, for three reasons. A file that is cut short under a map
kills the process with SIGBUS; a read that comes back short is an error one can report. A page fault in a map reads
ahead by the device's window (128 KiB by default), sixteen times what a sample of 4,096 two-byte tokens needs; with
POSIX_FADV_RANDOM a read fetches its own pages only. And a map of a 100 TB corpus costs page tables.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.fingerprint import fingerprint
from megatron.optimus.data.index_reader import DTYPES, PairSummary, document_starts, summarize_pair
from megatron.optimus.data.splits import HashSplits, read_splits

if TYPE_CHECKING:
    from megatron.optimus.platform.ranks import Ranks  # torch, which tools over files do without

MAX_OPEN = 128  # well below the usual limit of 1,024 descriptors of a process
_THREADS = 8  # headers on a parallel file system cost a round trip each
_PAIRS_PER_TASK = 64


def summarize(prefixes: Sequence[str], split: str = "1,0,0", *, fingerprints: bool = False) -> list[PairSummary]:
    """Summarizes pairs, many of them in threads.

    Args:
        prefixes: paths of the pairs, without suffix
        split: shares of the splits by hash, whose beginnings are read too
        fingerprints: whether fingerprints are computed
    """

    def summary(prefix: str) -> PairSummary:
        found = summarize_pair(prefix)
        digest = fingerprint(prefix) if fingerprints else 0
        return found._replace(fingerprint=digest, splits=read_splits(prefix, found.tokens, split))

    if len(prefixes) <= _PAIRS_PER_TASK:
        return [summary(prefix) for prefix in prefixes]
    tasks = [prefixes[i : i + _PAIRS_PER_TASK] for i in range(0, len(prefixes), _PAIRS_PER_TASK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="optimus-headers") as pool:
        results = pool.map(lambda task: [summary(prefix) for prefix in task], tasks)
        return [summary for result in results for summary in result]


def open_on_all_ranks(
    prefixes: Sequence[str], ranks: Ranks, split: str = "1,0,0", *, fingerprints: bool = False
) -> TokenFiles:
    """Opens the same pairs on every rank; each rank reads the headers of its share of them. Collective.

    Args:
        prefixes: paths of the pairs, without suffix; the same list on every rank
        ranks: the ranks that take part
        split: shares of the splits by hash
        fingerprints: also compute the fingerprints, of its share on each rank

    Raises:
        DataError: on every rank, if any pair cannot be used or the ranks do not have the same list: on a file system
            that is slow to show new files a glob may find other ones on other nodes.
    """
    digest = xxhash.xxh3_64_intdigest("\n".join(prefixes).encode()) >> 1
    [digest_of_rank_0] = ranks.broadcast([digest])

    def summarize_share() -> list[PairSummary]:
        if digest != digest_of_rank_0:
            raise DataError(f"finds other files ({len(prefixes)}) than rank 0; name them in one list, or start again")
        return summarize(prefixes[ranks.rank :: ranks.size], split, fingerprints=fingerprints)

    own = ranks.run_on_all_ranks(summarize_share, "opening the data", DataError)
    numbers = [[*summary[:-1], *summary.splits] for summary in own]
    summaries = [PairSummary(0, 0)] * len(prefixes)
    for rank, data in enumerate(ranks.all_gather_bytes(np.array(numbers, dtype=np.int64).tobytes())):
        pairs = np.frombuffer(data, np.int64).reshape(-1, 6).tolist()
        summaries[rank :: ranks.size] = [
            PairSummary(code, tokens, digest, HashSplits(*splits)) for code, tokens, digest, *splits in pairs
        ]
    return TokenFiles(prefixes, summaries=summaries)


class TokenFiles:
    """Pairs numbered from 0, which any thread may read. At most ``max_open`` of them are open at a time.

    Args:
        prefixes: paths of the pairs, without suffix
        summaries: what ``summarize`` found of each pair, if that is known already
        split: shares of the splits by hash, where there are no summaries
        max_open: files open at a time; the least recently used one is closed first

    Attributes:
        prefixes: paths of the pairs, without suffix
        number: number of each pair by its prefix
        tokens: int64 [files], tokens of each pair
        codes: uint8 [files], dtype code of each pair (``index_reader.DTYPES``)
        fingerprints: int64 [files], 0 where they were not computed
        splits: where the splits by hash of each pair begin, or ``NO_HASH_SPLITS``

    Raises:
        DataError: a pair is missing or truncated, does not belong together, or holds floats.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        summaries: Sequence[PairSummary] | None = None,
        split: str = "1,0,0",
        max_open: int = MAX_OPEN,
    ) -> None:
        self.prefixes = list(prefixes)
        self.number = {prefix: i for i, prefix in enumerate(self.prefixes)}
        self._max_open = max_open
        self._open: OrderedDict[int, int] = OrderedDict()  # file number -> descriptor, least recently used first
        self._lock = threading.Lock()
        summaries = summarize(self.prefixes, split) if summaries is None else summaries
        self.splits = [summary.splits for summary in summaries]
        self.tokens = np.array([summary.tokens for summary in summaries], dtype=np.int64)
        self.codes = np.array([summary.code for summary in summaries], dtype=np.uint8)
        self.fingerprints = np.array([summary.fingerprint for summary in summaries], dtype=np.int64)
        for prefix, code in zip(self.prefixes, self.codes, strict=True):
            if DTYPES[code].kind == "f":
                raise DataError(f"{prefix}.idx: dtype code says {DTYPES[code].name}; token ids must be integers")

    def __len__(self) -> int:
        return len(self.prefixes)

    def read(self, file: int, start: int, count: int) -> npt.NDArray[Any]:
        """Reads tokens [start, start + count) of a file: [count], in the file's element type.

        Raises:
            DataError: the file has disappeared, or has been cut, extended or replaced since the start.
        """
        dtype = DTYPES[self.codes[file]]
        with self._lock:
            data = self._read_bytes(file, start * dtype.itemsize, count * dtype.itemsize)
        return np.frombuffer(data, dtype)

    def document_starts(self, file: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Finds the first tokens, in [start, stop), of a file's documents: int64, ascending. Raises DataError."""
        return document_starts(f"{self.prefixes[file]}.idx", start, stop)

    def close(self) -> None:
        """Closes the open files. Reading opens them again."""
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
