"""Megatron's indexed datasets: pairs of ``<prefix>.bin`` (raw tokens) and ``<prefix>.idx`` (where each sequence lies).

``IndexedDataset`` maps a pair into memory, for tools and tests; training reads pairs through ``files.TokenFiles``.
``IndexedDatasetWriter`` writes one. The format of the .idx file is described in index_reader.py.

A damaged index must not crash a run hours later or make it train on noise, so opening a pair checks all of it: the
sizes of both files against the counts, before anything of that size is touched, and every length, offset and document
bound. Sequences must lie back to back and fill the .bin file, as every writer lays them out; a pair whose halves come
from different corpora fails that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.index_reader import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexReader,
    bin_path,
    idx_path,
    no_such_file,
    tokenizer_path,
)
from megatron.optimus.data.splits import splits_path
from megatron.optimus.platform.files import write_atomically

_CHUNK = 1 << 20  # elements processed together: bounds the memory, whatever the counts say
_MAX_SEQUENCE = (1 << 31) - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Element type that Megatron's tools choose for a vocabulary: uint16 below 65,500 entries, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def check_token_ids(path: str | os.PathLike[str], first: int, tokens: npt.NDArray[np.integer], vocab_size: int) -> None:
    """Checks that tokens lie within the vocabulary.

    Args:
        path: .bin file, named in the error
        first: number of the first token in the file
        tokens: [T], tokens of the file from ``first`` on
        vocab_size: entries of the vocabulary

    Raises:
        DataError: an id lies outside [0, vocab_size); names the first such token.
    """
    if not tokens.size or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    ids = tokens.astype(np.int64)
    bad = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    raise DataError(
        f"{path}: token {first + bad} has id {ids[bad]}, outside the vocabulary of {vocab_size} "
        f"(ids 0 to {vocab_size - 1}); tokenize with the model's tokenizer or raise vocab_size"
    )


class IndexedDataset:
    """A .bin/.idx pair, memory-mapped and checked whole.

    Attributes:
        prefix: path without suffix
        dtype: element type of the .bin file
        sizes: int32 [S], tokens of each sequence
        document_index: int64 [D], sequence number at each document bound
        tokens: ``dtype`` [tokens_total], the file's tokens in order, read-only
        tokens_total: int

    Raises:
        DataError: a file is missing, truncated, too long or inconsistent; names file and field.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise no_such_file(path)
        try:
            with IndexReader(str(self._idx)) as index:
                index.check_document_ends()
                index.check_entries()
                index.check_bin_size(self._bin, self._bin.stat().st_size)
                header, self.dtype = index.header, index.dtype
            raw, self.tokens = _map_file(self._idx), _map_file(self._bin).view(self.dtype)
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot read the .bin/.idx pair: {error}") from error
        lengths_end = HEADER.size + 4 * header.sequences
        offsets_end = lengths_end + 8 * header.sequences
        self.sizes: npt.NDArray[np.int32] = raw[HEADER.size : lengths_end].view("<i4")
        self._offsets: npt.NDArray[np.int64] = raw[lengths_end:offsets_end].view("<i8")
        self.document_index: npt.NDArray[np.int64] = raw[offsets_end : offsets_end + 8 * header.documents].view("<i8")
        self.tokens_total = int(self.tokens.size)

    def __len__(self) -> int:
        return int(self.sizes.size)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns tokens [offset, offset + length) of sequence ``i``, by default to its end: ``dtype`` [length], a
        view.

        Raises:
            IndexError: the sequence does not exist or does not hold that range.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {offset + length}) of sequence {i}, which has {size}")
        start = int(self._offsets[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def check_token_ids(self, vocab_size: int) -> None:
        """Reads the whole .bin file. Raises DataError at the first token id outside [0, vocab_size)."""
        if self.dtype.kind == "f":
            raise DataError(f"{self._idx}: dtype code says {self.dtype.name}; token ids must be integers")
        if self.dtype.kind == "u" and vocab_size > np.iinfo(self.dtype).max:
            return
        for start in range(0, self.tokens_total, _CHUNK):
            check_token_ids(self._bin, start, self.tokens[start : start + _CHUNK], vocab_size)


def _map_file(path: Path) -> npt.NDArray[Any]:
    """The whole file as read-only bytes, paged in on use. An empty file, which cannot be mapped, gives no bytes."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


class IndexedDatasetWriter:
    """Writes a pair, byte for byte as megatron-core's ``IndexedDatasetBuilder`` does. A context manager.

    Leaving the block normally commits; an exception removes what was written. Until the commit the data lie under
    ``<prefix>.bin.<random>.tmp``, and an earlier pair of that prefix stays usable. The commit flushes both files to
    disk and renames .bin before .idx, so a reader never sees an index without its data; a kill in the middle can leave
    a .bin file alone, or temporary files, but not a wrong pair.

    Args:
        prefix: path without suffix; its folder is made if it is missing
        dtype: element type of the .bin file, one of ``DTYPES``

    Raises:
        DataError: the element type is not in the format, a token does not fit it, a sequence is longer than the format
            allows, or the disk refuses (full, read-only, over quota).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(f"dtype {self.dtype} has no code in the .idx format; use one of {list(DTYPES.values())}")
        self._code = codes[0]
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._beside = splits_path(prefix), tokenizer_path(prefix)
        mark = secrets.token_hex(4)
        self._bin_temporary = Path(f"{self._bin}.{mark}.tmp")
        self._idx_temporary = Path(f"{self._idx}.{mark}.tmp")
        self.splits: str | None = None  # content of the split file to write beside the pair; None: it has none
        self._sizes = array("i")
        self._document_index = array("q", [0])
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._stream: BinaryIO = open(self._bin_temporary, "xb", buffering=1 << 20)  # noqa: SIM115
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(f"{self._bin}: cannot write: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise DataError(f"{self._bin}: cannot write: {error.strerror}") from error

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Appends one document.

        Args:
            tokens: [T], integers, or floats for a file of floats
            lengths: tokens of each of the document's sequences; by default the document is one sequence, or none if it
                has no tokens, as in Megatron's preprocessing
        """
        values = np.asarray(tokens)
        if values.size and values.dtype != self.dtype:
            self._check_range(values)
        lengths = ([values.size] if values.size else []) if lengths is None else lengths
        if sum(lengths) != values.size or any(length < 0 for length in lengths):
            raise ValueError(f"lengths {list(lengths)[:8]} must not be negative and add up to the {values.size} tokens")
        if any(length > _MAX_SEQUENCE for length in lengths):
            raise DataError(f"{self._bin}: a sequence of {max(lengths)} tokens; the format holds up to {_MAX_SEQUENCE}")
        self._write(values.astype(self.dtype, copy=False))
        self._sizes.extend(lengths)
        self._document_index.append(len(self._sizes))

    def add_documents(self, tokens: npt.NDArray[Any], lengths: Sequence[int]) -> None:
        """Appends many documents, each of which becomes one sequence, or none if it has no tokens.

        Args:
            tokens: [T], the tokens of all documents back to back, in the file's element type
            lengths: tokens of each document
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if tokens.dtype != self.dtype or sizes.sum() != tokens.size or (sizes < 0).any():
            raise ValueError(
                f"lengths {list(lengths)[:8]} must not be negative and add up to the {tokens.size} tokens, which are "
                f"{tokens.dtype.name} and must be {self.dtype.name}"
            )
        if (sizes > _MAX_SEQUENCE).any():
            raise DataError(f"{self._bin}: a sequence of {sizes.max()} tokens; the format holds up to {_MAX_SEQUENCE}")
        self._write(tokens)
        bounds = len(self._sizes) + np.cumsum(sizes > 0, dtype=np.int64)
        self._sizes.frombytes(sizes[sizes > 0].astype(np.intc).tobytes())
        self._document_index.frombytes(bounds.tobytes())

    def add_pair(self, prefix: str | os.PathLike[str]) -> None:
        """Appends all documents of the pair ``prefix``. Raises DataError if its element type is another one."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"{prefix}: holds {other.dtype.name}, {self._bin} is to hold {self.dtype.name}")
        for start in range(0, other.tokens_total, _CHUNK):
            self._write(other.tokens[start : start + _CHUNK])
        bounds = other.document_index[1:].astype(np.int64) + len(self._sizes)
        self._sizes.frombytes(other.sizes.astype(np.intc).tobytes())
        self._document_index.frombytes(bounds.tobytes())

    def commit(self) -> None:
        """Renames the pair to its final name. Raises DataError and removes the files if the disk refuses."""
        try:
            _flush_to_disk(self._stream)
            self._stream.close()
            with open(self._idx_temporary, "xb", buffering=1 << 20) as index:
                self._write_index(index)
                _flush_to_disk(index)
            self._idx.unlink(missing_ok=True)  # an old index must never be seen next to the new data
            for path in self._beside:
                path.unlink(missing_ok=True)
            os.replace(self._bin_temporary, self._bin)
            if self.splits is not None:
                write_atomically(self._beside[0], self.splits)
            os.replace(self._idx_temporary, self._idx)
            folder = os.open(self._bin.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise DataError(f"{self._bin}: cannot write: {error.strerror}") from error
            raise

    def abort(self) -> None:
        """Removes the temporary files and leaves final files alone. May be called twice."""
        with contextlib.suppress(OSError):  # if the buffer cannot be flushed: the file goes anyway
            self._stream.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)

    def _write(self, values: npt.NDArray[Any]) -> None:
        try:
            self._stream.write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise DataError(f"{self._bin}: cannot write: {error.strerror}") from error

    def _check_range(self, values: npt.NDArray[Any]) -> None:
        if self.dtype.kind == "f":
            return
        if values.dtype.kind not in "iu":
            raise DataError(f"{self._bin}: tokens of dtype {values.dtype} for a file of {self.dtype.name}")
        limits = np.iinfo(self.dtype)
        low, high = int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{self._bin}: token id {low if low < limits.min else high} does not fit {self.dtype.name} "
                f"({limits.min} to {limits.max}); choose the element type with token_dtype(vocab_size)"
            )

    def _write_index(self, index: BinaryIO) -> None:
        sizes = np.frombuffer(self._sizes, dtype=np.intc)
        bounds = np.frombuffer(self._document_index, dtype=np.longlong)
        index.write(HEADER.pack(MAGIC, VERSION, self._code, sizes.size, bounds.size))
        index.write(sizes.astype("<i4", copy=False).tobytes())
        position = 0
        for start in range(0, sizes.size, _CHUNK):
            ends = position + np.cumsum(sizes[start : start + _CHUNK], dtype=np.int64) * self.dtype.itemsize
            index.write(np.concatenate(([position], ends[:-1])).astype("<i8").tobytes())
            position = int(ends[-1])
        index.write(bounds.astype("<i8", copy=False).tobytes())


def _flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
