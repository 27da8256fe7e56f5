"""Documents from files: JSON lines (the text under a key), parquet (in a column), plain text (a file is a document).

JSON lines and text may be compressed (.gz, .zst). Reading is in two halves, so that parsing can run in other processes:
``read_batches`` cuts files into batches of raw lines that know where they come from; ``parse_batch`` turns a batch into
documents.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from megatron.optimus.data.errors import DataError

logger = logging.getLogger("optimus")

BATCH_BYTES = 1 << 20
BATCH_LINES = 4096
_COMPRESSED = (".gz", ".zst")
_TEXT = (".txt", ".md")
_IN_FOLDERS = (".jsonl", ".json", ".ndjson", ".parquet", *_TEXT)
_SKIP_HINT = "repair the line, or pass --skip-malformed to leave such lines out"


class Format(Enum):
    JSON_LINES = "JSON lines"
    TEXT = "text"
    PARQUET = "parquet"


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file; only uncompressed JSON lines are ever cut, at line ends."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines (or rows, or one text) of one file.

    ``first_line`` counts from 1, from the beginning of the range that starts at byte ``range_start``. ``rows`` holds
    the values of a parquet file's columns. ``position``: bytes of the file read so far, for progress.
    """

    path: str
    first_line: int
    lines: list[bytes]
    num_bytes: int
    range_start: int = 0
    format: Format = Format.JSON_LINES
    rows: list[list[object]] | None = None
    position: int = 0


@dataclass
class ParsedBatch:
    """``documents[i]`` holds the texts of one line, one per key; ``malformed`` a message for each line left out."""

    documents: list[list[str]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


def expand_inputs(patterns: Iterable[str]) -> list[Path]:
    """Files named by paths or globs: in the order given, the matches of one glob sorted.

    A folder stands for the files below it that can be read, sorted. Raises DataError if a pattern matches no file, or
    a file is named twice (its documents would count twice).
    """
    paths: list[Path] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files: list[Path] = []
        for match in map(Path, matches):
            files += [match] if match.is_file() else sorted(filter(_is_readable, match.rglob("*")))
        if not files:
            what = f"no file below it ends in {', '.join(_IN_FOLDERS)} (or .gz, .zst)" if matches else "no such file"
            raise DataError(f"{pattern}: {what}")
        paths.extend(files)
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise DataError(f"{path}: named twice by the input; its documents would be counted twice")
        seen.add(path.resolve())
    if not paths:
        raise DataError("no input files given")
    return paths


def _inner_suffix(path: Path) -> str:
    """The suffix that names the format: of a.jsonl.gz, .jsonl"""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix.lower()


def _is_readable(path: Path) -> bool:
    return path.is_file() and _inner_suffix(path) in _IN_FOLDERS


def format_of(path: Path) -> Format:
    """By suffix; whatever is not known is taken for JSON lines."""
    suffix = _inner_suffix(path)
    return Format.PARQUET if suffix == ".parquet" else Format.TEXT if suffix in _TEXT else Format.JSON_LINES


def split_file(path: Path, max_bytes: int) -> list[FileRange]:
    """The file as ranges of about ``max_bytes``, cut at line ends; one range where a format cannot be cut."""
    size = path.stat().st_size
    whole = FileRange(str(path), 0, size)
    if format_of(path) is not Format.JSON_LINES or path.suffix in _COMPRESSED or size <= max_bytes:
        return [whole]
    count = -(-size // max_bytes)
    cuts = [0]
    with open(path, "rb") as stream:
        for i in range(1, count):
            stream.seek(max(size * i // count - 1, cuts[-1]))
            stream.readline()  # to the end of the line that the cut falls into
            if cuts[-1] < stream.tell() < size:
                cuts.append(stream.tell())
    return [FileRange(str(path), start, stop) for start, stop in zip(cuts, [*cuts[1:], size], strict=True)]


class _ZstReader(io.RawIOBase):
    """Decompressed bytes of a .zst stream. zstandard's own reader takes a truncated file for a complete one."""

    def __init__(self, stream: BinaryIO, zstandard: Any) -> None:
        self._stream = stream
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._inside_frame = False
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._stream.read(1 << 17)
            if not self._input:
                if self._inside_frame:
                    raise EOFError("compressed data end before the end-of-frame mark")
                return 0
            self._output = self._frame.decompress(self._input)
            self._inside_frame = not self._frame.eof
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


def _open_stream(path: Path, raw: BinaryIO) -> BinaryIO:
    """The uncompressed bytes of an open file."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)  # type: ignore[arg-type]
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from error
        return io.BufferedReader(_ZstReader(raw, zstandard), 1 << 20)
    return raw


@contextlib.contextmanager
def _readable(path: Path, reached: Callable[[], int]) -> Iterator[None]:
    """Errors of files and archives become DataErrors that name the line reached."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        # the error types of zstandard and pyarrow cannot be named here, as the packages are optional
        known = isinstance(error, (OSError, EOFError, zlib.error))
        if not known and type(error).__name__ not in ("ZstdError", "ArrowInvalid", "ArrowException"):
            raise
        if isinstance(error, PermissionError):
            raise DataError(f"{path}: {error.strerror}; give this user the right to read it") from error
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{path}:{reached()}: cannot read on: {reason}; the file is damaged or incomplete") from error


def read_batches(files: Iterable[Path | FileRange], keys: Sequence[str] = ("text",)) -> Iterator[LineBatch]:
    """Batches of about ``BATCH_BYTES`` uncompressed bytes, in file order. Raises DataError for a file without lines."""
    for file in files:
        part = FileRange(str(file), 0, sys.maxsize) if isinstance(file, Path) else file
        kind = format_of(Path(part.path))
        if kind is Format.PARQUET:
            batches = _parquet_batches(Path(part.path), keys)
        elif kind is Format.TEXT:
            batches = _text_batches(Path(part.path))
        else:
            batches = _line_batches(part)
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise DataError(f"{part.path}: the file is empty; leave it out of the input")


def _line_batches(part: FileRange) -> Iterator[LineBatch]:
    """Lines without their line end."""
    path, first, number = Path(part.path), 1, 0
    lines: list[bytes] = []
    num_bytes, left = 0, sys.maxsize if path.suffix in _COMPRESSED else part.stop - part.start
    with _readable(path, lambda: number + 1), open(path, "rb", buffering=1 << 20) as raw:
        raw.seek(part.start)
        for line in _open_stream(path, raw):
            number += 1
            left -= len(line)
            lines.append(line.rstrip(b"\r\n"))
            num_bytes += len(lines[-1]) + 1
            if num_bytes >= BATCH_BYTES or len(lines) >= BATCH_LINES:
                yield LineBatch(part.path, first, lines, num_bytes, part.start, position=raw.tell() - part.start)
                lines, num_bytes, first = [], 0, number + 1
            if left <= 0:
                break
    if lines:
        yield LineBatch(part.path, first, lines, num_bytes, part.start)


def _text_batches(path: Path) -> Iterator[LineBatch]:
    with _readable(path, lambda: 1), open(path, "rb") as raw:
        content = _open_stream(path, raw).read()
    if content:
        yield LineBatch(str(path), 1, [content], len(content), format=Format.TEXT)


def _parquet_batches(path: Path, keys: Sequence[str]) -> Iterator[LineBatch]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs the package pyarrow: pip install pyarrow") from error
    first, total = 1, path.stat().st_size
    with _readable(path, lambda: first), pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if missing := [key for key in keys if key not in names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {names[:8]} (choose with --json-keys)")
        for batch in table.iter_batches(batch_size=256, columns=list(keys)):
            rows = [list(row) for row in zip(*(batch.column(key).to_pylist() for key in keys), strict=True)]
            size = sum(len(value) for row in rows for value in row if isinstance(value, str))
            done = total * (first + len(rows)) // max(1, table.metadata.num_rows)
            yield LineBatch(str(path), first, [], size, format=Format.PARQUET, rows=rows, position=done)
            first += len(rows)


def _shown(line: bytes) -> str:
    text = line[:40].decode("utf-8", errors="replace")
    return repr(text + ("..." if len(line) > 40 else ""))


def _encoding_hint(content: bytes) -> str:
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    return " but UTF-16, by its first bytes: convert it with iconv -f UTF-16 -t UTF-8" * is_utf16


def _parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Texts of one line. Raises ValueError with the reason."""
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line{_encoding_hint(line)}") from error
    except json.JSONDecodeError as error:
        hint = "; a file is expected to hold an object a line, not one array (jq -c '.[]')" * (line.strip() == b"[")
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}): {_shown(line)}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        raise ValueError(f"not JSON that can be read ({error}): {_shown(line)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object: {_shown(line)}")
    texts = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; the object has {sorted(record)[:8]} (choose with --json-keys)")
        texts.append(_checked_text(key, record[key]))
        # only an escape can bring half of a surrogate pair; ASCII, a flag of the string, spares the search
        if not texts[-1].isascii() and (b"\\ud" in line or b"\\uD" in line):
            try:
                texts[-1].encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"key {key!r} holds half of a surrogate pair at character {error.start}") from error
    return texts


def _checked_text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"key {key!r} holds a {type(value).__name__}, expected a string")
    return value


def _parse_text(content: bytes, keys: Sequence[str]) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the file{_encoding_hint(content)}") from error
    return [text] * len(keys)


def _place(batch: LineBatch, number: int) -> str:
    """file:line. In a range that begins inside the file the lines before it are counted now, as they matter now."""
    if batch.range_start:
        with open(batch.path, "rb") as stream:
            left = batch.range_start
            while left and (chunk := stream.read(min(left, 1 << 22))):
                number += chunk.count(b"\n")
                left -= len(chunk)
    return f"{batch.path}:{number}"


def parse_batch(batch: LineBatch, keys: Sequence[str], skip_malformed: bool = False) -> ParsedBatch:
    """The batch's documents. A malformed line raises DataError with file and line, or is noted if they are skipped."""
    parsed = ParsedBatch()
    entries: Sequence[Any] = batch.lines if batch.rows is None else batch.rows
    for number, entry in enumerate(entries, start=batch.first_line):
        try:
            if batch.format is Format.PARQUET:
                texts = [_checked_text(key, value) for key, value in zip(keys, entry, strict=True)]
            else:
                if number == 1 and not batch.range_start:
                    entry = entry.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901  byte-order mark of some editors
                texts = (_parse_text if batch.format is Format.TEXT else _parse_line)(entry, keys)
            parsed.documents.append(texts)
        except ValueError as error:
            message = f"{_place(batch, number)}: {error}"
            if not skip_malformed:
                raise DataError(f"{message}; {_SKIP_HINT}") from error
            parsed.malformed.append(message)
    return parsed


def read_documents(paths: Iterable[Path], key: str = "text", skip_malformed: bool = False) -> Iterator[str]:
    """Texts of all documents, in order. Warns with the number of lines left out, if any.

    Raises DataError for a malformed line (unless skipped), an unreadable or empty file, or no document at all.
    """
    documents = malformed = 0
    for batch in read_batches(paths, [key]):
        parsed = parse_batch(batch, [key], skip_malformed)
        documents += len(parsed.documents)
        malformed += len(parsed.malformed)
        for (text,) in parsed.documents:
            yield text
    if malformed:
        logger.warning("%d malformed lines left out", malformed)
    if not documents:
        raise DataError(f"no documents in the input ({malformed} malformed lines left out)")
