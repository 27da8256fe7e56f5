"""Megatron's token files: ``<prefix>.bin`` (raw tokens) and ``<prefix>.idx`` (where each sequence lies).

Everything is little-endian and unpadded. The .idx file, with S sequences and D document bounds:

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

A damaged index must not crash a run hours later or make it train on noise, so opening a pair checks all of it: sizes of
both files against the counts, before anything of that size is touched, and every length, offset and bound. Sequences
must lie back to back and fill the .bin file, as every writer lays them out; a pair whose halves come from different
corpora fails that.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.errors import DataError

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
_HEADER = struct.Struct("<9sQBQQ")
HEADER_SIZE = _HEADER.size  # 34 bytes
_CHUNK = 1 << 20  # elements looked at together: bounds the memory of checks, whatever the counts say
_MAX_SEQUENCE = (1 << 31) - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Element type Megatron's tools choose for a vocabulary: uint16 below 65,500 entries, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def no_such_file(path: Path) -> DataError:
    """The error for a file of a pair that is missing. Names pairs beside it whose names only go on from there."""
    near = sorted(str(other.with_suffix("")) for other in path.parent.glob(glob.escape(path.stem) + "_*.idx"))
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else ", of a pair that `optimus preprocess` has written"
    return DataError(f"{path}: no such file; give the prefix without .bin or .idx{hint}")


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The whole file as read-only bytes, paged in on use. An empty file, which cannot be mapped, gives no bytes."""
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


class Header(NamedTuple):
    """Counts of an .idx file, known to fit its size."""

    code: int  # key of DTYPES
    sequences: int
    documents: int  # document bounds: documents + 1


def parse_header(path: str | os.PathLike[str], raw: bytes, size: int) -> Header:
    """The header ``raw`` of an .idx file of ``size`` bytes. Raises DataError, naming file and field.

    The counts are compared with the file's size as Python integers, so none can overflow or make anyone allocate.
    """
    if size < HEADER_SIZE or len(raw) < HEADER_SIZE:
        raise DataError(f"{path}: truncated: {size} bytes, the header alone has {HEADER_SIZE}")
    magic, version, code, sequences, documents = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise DataError(f"{path}: wrong magic {magic!r}, expected {MAGIC!r}; this is no Megatron .idx file")
    if version != VERSION:
        raise DataError(f"{path}: version {version} is not supported, only {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path}: unknown dtype code {code}, expected one of {sorted(DTYPES)}")
    if documents < 1:
        raise DataError(f"{path}: document count is 0; even an empty file has the bound 0")
    needed = HEADER_SIZE + 12 * sequences + 8 * documents
    if size not in (needed, needed + sequences):  # the latter: with modes
        kind = "truncated" if size < needed else "too long"
        raise DataError(
            f"{path}: {kind}: sequence count {sequences} and document count {documents} need {needed} bytes, "
            f"the file has {size}; write it again"
        )
    return Header(code, sequences, documents)


class IndexedDataset:
    """A .bin/.idx pair, memory-mapped and checked.

    Attributes:
        prefix: path without suffix
        dtype: element type of the .bin file
        sizes: int32 [S], tokens per sequence
        document_index: int64 [D], sequence number at each document bound
        tokens: ``dtype`` [tokens_total], the file's tokens in order, read-only
        tokens_total: int

    Raises DataError, naming file and field, if a file is missing, truncated, too long, or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise no_such_file(path)
        try:
            raw = _map_file(self._idx)
            self._parse(raw)
            bin_bytes = _map_file(self._bin)
            self._check_sequences(bin_bytes.size)
            self._check_documents()
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot read the .bin/.idx pair: {error}") from error
        self.tokens: npt.NDArray[Any] = bin_bytes.view(self.dtype)
        self.tokens_total = int(self.tokens.size)

    def __len__(self) -> int:
        return int(self.sizes.size)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens [offset, offset + length) of sequence ``i`` (to its end by default): ``dtype`` [length], a view.

        Raises IndexError if the sequence does not exist or does not hold that range.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {offset + length}) of sequence {i}, which has {size}")
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def check_token_ids(self, vocab_size: int) -> None:
        """Reads the whole .bin file; raises DataError at the first token id outside [0, vocab_size)."""
        if self.dtype.kind == "f":
            raise DataError(f"{self._idx}: dtype code says {self.dtype.name}; token ids must be integers")
        if self.dtype.kind == "u" and vocab_size > np.iinfo(self.dtype).max:
            return
        for start in range(0, self.tokens_total, _CHUNK):
            chunk = self.tokens[start : start + _CHUNK]
            if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
                values = chunk.astype(np.int64)
                first = int(np.argmax((values < 0) | (values >= vocab_size)))
                raise DataError(
                    f"{self._bin}: token {start + first} has id {values[first]}, outside the vocabulary of "
                    f"{vocab_size} (ids 0 to {vocab_size - 1}); tokenize with the model's tokenizer or raise vocab_size"
                )

    def _parse(self, raw: npt.NDArray[np.uint8]) -> None:
        code, sequences, documents = parse_header(self._idx, raw[:HEADER_SIZE].tobytes(), raw.size)
        needed = HEADER_SIZE + 12 * sequences + 8 * documents
        self.dtype = DTYPES[code]
        sizes_end = HEADER_SIZE + 4 * sequences
        pointers_end = sizes_end + 8 * sequences
        self.sizes: npt.NDArray[np.int32] = raw[HEADER_SIZE:sizes_end].view("<i4")
        self._pointers: npt.NDArray[np.int64] = raw[sizes_end:pointers_end].view("<i8")
        self.document_index: npt.NDArray[np.int64] = raw[pointers_end:needed].view("<i8")

    def _check_sequences(self, bin_size: int) -> None:
        """Lengths are not negative; offsets are their running sum; the .bin file ends where the last sequence does."""
        position = 0  # byte offset at which the next sequence must begin
        for start in range(0, len(self), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if int(sizes.min()) < 0:
                bad = int(np.argmax(sizes < 0))
                raise DataError(f"{self._idx}: sequence {start + bad} has the negative length {sizes[bad]}")
            ends = position + np.cumsum(sizes) * self.dtype.itemsize
            expected = np.concatenate(([position], ends[:-1]))
            wrong = self._pointers[start : start + _CHUNK] != expected
            if wrong.any():
                bad = int(np.argmax(wrong))
                raise DataError(
                    f"{self._idx}: pointer of sequence {start + bad} is {self._pointers[start + bad]}, but the lengths "
                    f"before it add up to {expected[bad]} bytes; the index is damaged, write it again"
                )
            position = int(ends[-1])
            if position > bin_size:
                break
        if position != bin_size:
            kind = "truncated" if position > bin_size else "too long"
            at_least = "at least " if position > bin_size else ""
            raise DataError(
                f"{self._bin}: {kind}: {self._idx.name} describes {at_least}{position} bytes of {self.dtype.name}, the "
                f"file has {bin_size}; it is incomplete or belongs to another index, write the pair again"
            )

    def _check_documents(self) -> None:
        bounds = self.document_index
        if int(bounds[0]) != 0:
            raise DataError(f"{self._idx}: first document bound is {bounds[0]}, expected 0")
        if int(bounds[-1]) != len(self):
            raise DataError(f"{self._idx}: last document bound is {bounds[-1]}, expected {len(self)} (sequence count)")
        for start in range(0, bounds.size - 1, _CHUNK):
            chunk = bounds[start : start + _CHUNK + 1]
            falling = chunk[1:] < chunk[:-1]
            if falling.any():
                bad = start + int(np.argmax(falling))
                raise DataError(f"{self._idx}: document bound {bad + 1} is {bounds[bad + 1]}, after {bounds[bad]}")


class IndexedDatasetWriter:
    """Writes a pair, byte for byte as megatron-core's builder does; a context manager.

    Leaving the block normally commits; an exception removes what was written. Until the commit the data lie under
    ``<prefix>.bin.<random>.tmp``; an earlier pair of that prefix stays usable until then. The commit flushes both files
    to disk and renames .bin before .idx, so a reader never sees an index without its data; a kill in the middle can
    leave a .bin file alone, or temporary files, but not a wrong pair.

    Raises DataError if a token does not fit ``dtype``, a sequence is longer than the format allows, or the disk refuses
    (full, read-only, over quota).
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(f"dtype {self.dtype} has no code in the .idx format; use one of {list(DTYPES.values())}")
        self._code = codes[0]
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        mark = secrets.token_hex(4)
        self._bin_temporary = Path(f"{self._bin}.{mark}.tmp")
        self._idx_temporary = Path(f"{self._idx}.{mark}.tmp")
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
        """Appends one document: integer (or, for float files, float) ``tokens`` [T], cut into sequences of ``lengths``.

        By default the document is one sequence, or none if it has no tokens (as Megatron's preprocessing does).
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
        """``add_document`` of many at once: ``tokens`` [T] of the file's element type, back to back; each document is
        one sequence, or none if its length is 0.
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
        """Appends all documents of another pair of the same element type. Raises DataError."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"{prefix}: holds {other.dtype.name}, {self._bin} is to hold {self.dtype.name}")
        for start in range(0, other.tokens_total, _CHUNK):
            self._write(other.tokens[start : start + _CHUNK])
        bounds = other.document_index[1:].astype(np.int64) + len(self._sizes)
        self._sizes.frombytes(other.sizes.astype(np.intc).tobytes())
        self._document_index.frombytes(bounds.tobytes())

    def commit(self) -> None:
        """Makes the pair appear under its final name. Raises DataError, leaving nothing, if the disk refuses."""
        try:
            _flush_to_disk(self._stream)
            self._stream.close()
            with open(self._idx_temporary, "xb", buffering=1 << 20) as index:
                self._write_index(index)
                _flush_to_disk(index)
            self._idx.unlink(missing_ok=True)  # an old index must never be seen next to the new data
            os.replace(self._bin_temporary, self._bin)
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
        """Removes the temporary files; final files are untouched. May be called twice."""
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
        index.write(_HEADER.pack(MAGIC, VERSION, self._code, sizes.size, bounds.size))
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
