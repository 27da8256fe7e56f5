"""Reads documents from JSON lines (the text under a key), parquet (in a column) and plain text (a file is a document).

JSON lines and text may be compressed (.gz, .zst). Reading has two halves, the second of which can run in other
processes: ``read_batches`` cuts files into batches that know where they come from; ``parse_batch`` turns a batch into
documents. A batch of uncompressed JSON lines is a range of bytes, which ``parse_batch`` reads itself: no line goes
through a pipe between processes.

A new format needs a member of ``FileFormat``, its suffix in ``SUFFIXES`` and ``format_of``, a generator of batches that
``read_batches`` calls, and a case in ``_parse_entry``. Documents keep the order of the file.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from megatron.optimus.data.errors import DataError

logger = logging.getLogger("optimus")

BATCH_BYTES = 1 << 20  # uncompressed
MAX_LINE_BYTES = 1 << 28  # default of --max-line-bytes; a longer line takes some eight times its length in memory
COMPRESSED = (".gz", ".zst")
_TEXT = (".txt", ".md")
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", *_TEXT)  # of the files that are read in folders

_LAST_BATCHES = 16  # a batch is at most 1/16 of what is left of its range, so that workers end together,
_SMALLEST_FRACTION = 4  # but at least 1/4 of BATCH_BYTES where so much is left
_ZST_INPUT_BYTES = 1 << 12  # decompressed at once: 128 MiB at most, for a block of 128 KiB has 4 bytes at least
_LINE_BYTES = 1 << 14  # read beyond a batch for the end of its last line
_DECODER = json.JSONDecoder()
_MAX_FAILURES = 16  # of the fast parser in a batch, before the slow one takes the rest
_SKIP_HINT = "repair the line, or pass --skip-malformed to skip such lines"


class FileFormat(Enum):
    """Format of an input file."""

    JSON_LINES = "JSON lines"
    TEXT = "text"
    PARQUET = "parquet"


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file. Only uncompressed JSON lines are cut into several ranges, at line ends."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines or rows, or the one text, of one file. Exactly one of content, rows and source is set."""

    path: str
    first_line: int = 1  # from 1; with ``source`` counted from its start
    content: bytes | None = None  # whole lines, or a text
    rows: list[list[object]] | None = None  # the values of a parquet file's columns
    source: FileRange | None = None  # bytes still to be read: the batch is the lines that begin in this range
    limit: int = 0  # with ``source``: the byte by which its last line ends
    format: FileFormat = FileFormat.JSON_LINES
    position: int = 0  # bytes of the file range up to the batch's end, for progress
    max_line_bytes: int = MAX_LINE_BYTES  # with ``source``: a longer line is refused


@dataclass
class ParsedBatch:
    """Documents of a batch."""

    documents: list[list[str]] = field(default_factory=list)  # for each line its texts, one per key
    malformed: list[str] = field(default_factory=list)  # a message for each skipped line
    num_bytes: int = 0  # uncompressed bytes of the batch


def expand_inputs(patterns: Iterable[str]) -> list[Path]:
    """Finds the input files.

    Args:
        patterns: files, globs, or folders, which stand for the files below them that end in one of ``SUFFIXES``

    Returns:
        Files in the order of the patterns; the matches of one pattern are sorted.

    Raises:
        DataError: a pattern matches no file, or a file is named twice (its documents would count twice).
    """
    paths: list[Path] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files: list[Path] = []
        for match in map(Path, matches):
            files += [match] if match.is_file() else sorted(filter(_is_readable, match.rglob("*")))
        if not files:
            what = f"no file below it ends in {', '.join(SUFFIXES)} (or .gz, .zst)" if matches else "no such file"
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
    """The suffix that names the format: .jsonl for a.jsonl.gz"""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def _is_readable(path: Path) -> bool:
    return path.is_file() and _inner_suffix(path) in SUFFIXES


def format_of(path: Path) -> FileFormat:
    """Returns the format of a file by its suffix: JSON lines, if the suffix is unknown."""
    suffix = _inner_suffix(path)
    return FileFormat.PARQUET if suffix == ".parquet" else FileFormat.TEXT if suffix in _TEXT else FileFormat.JSON_LINES


def split_file(path: Path, max_bytes: int) -> list[FileRange]:
    """Cuts a file at line ends into ranges of about ``max_bytes``; one range if its format cannot be cut."""
    size = path.stat().st_size
    whole = FileRange(str(path), 0, size)
    if format_of(path) is not FileFormat.JSON_LINES or path.suffix in COMPRESSED or size <= max_bytes:
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
    """Reads a .zst stream uncompressed. zstandard's own reader takes a truncated file for a complete one."""

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
            self._input = self._input or self._stream.read(_ZST_INPUT_BYTES)
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


def open_stream(path: Path, raw: BinaryIO) -> BinaryIO:
    """Wraps an open .gz or .zst file so that reading gives uncompressed bytes; returns others as they are."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)  # type: ignore[arg-type]
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path}: reading .zst needs the package zstandard: pip install zstandard (extra [zstd])"
            ) from error
        return io.BufferedReader(_ZstReader(raw, zstandard), 1 << 20)
    return raw


def _refuse_longer(size: int, max_line_bytes: int, where: str) -> None:
    if size > max_line_bytes:
        raise DataError(
            f"{where}: a line or text of more than {max_line_bytes} bytes; cut it, leave it out, or raise "
            "--max-line-bytes where there is memory for some eight times as much"
        )


def read_lines(
    path: str, start: int, stop: int, limit: int, step: int, max_line_bytes: int = MAX_LINE_BYTES
) -> tuple[int, bytes]:
    """Reads the lines that begin in bytes [``start``, ``stop``) of a file.

    Args:
        path: file
        start: first byte of the range
        stop: end of the range
        limit: byte by which the last of these lines ends
        step: bytes to read beyond ``stop`` for the end of the last line; if it is not there, twice as many, and so on
        max_line_bytes: longest that the last line may reach beyond ``stop``

    Returns:
        (byte at which the first line begins, all lines)

    Raises:
        DataError: the last line is longer.
        EOFError: the file is shorter.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as stream:
        begin = max(0, start - 1)  # with the byte before: a line begins at the start if that ends one
        content, size = _pread(stream.fileno(), begin, min(limit, stop + step)), stop - begin
        first = content.find(b"\n", 0, size) + 1 if start else 0
        if start and first in (0, size):
            return stop, b""
        end = content.find(b"\n", size - 1) + 1
        if end or begin + len(content) == limit:
            return begin + first, content[first : end or len(content)]
        chunks, at = [content[first:]], begin + len(content)
        while at < limit and not chunks[-1].endswith(b"\n"):
            _refuse_longer(at - stop, max_line_bytes, f"{path}: from byte {stop} on")
            step *= 2
            chunk = _pread(stream.fileno(), at, min(limit, at + step))
            chunks.append(chunk[: chunk.find(b"\n") + 1] or chunk)
            at += len(chunk)
        return begin + first, b"".join(chunks)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    content = os.pread(descriptor, stop - start, start)
    while len(content) < stop - start:
        more = os.pread(descriptor, stop - start - len(content), start + len(content))
        if not more:
            raise EOFError(f"it has shrunk to {start + len(content)} bytes since its size was looked up")
        content += more
    return content


@contextlib.contextmanager
def _naming_errors(path: Path, reached: Callable[[], int] | None = None) -> Iterator[None]:
    """Turns errors of files and archives into DataErrors that name the line reached, where that is known."""
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
        where = str(path) if reached is None else f"{path}:{reached()}"
        raise DataError(f"{where}: cannot read on: {reason}; the file is damaged or incomplete") from error


def read_batches(
    files: Iterable[Path | FileRange], keys: Sequence[str] = ("text",), max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[LineBatch]:
    """Yields the batches of files, in order, each of about ``BATCH_BYTES`` or one longer line.

    Files without content are skipped with a warning.

    Args:
        files: input files, or ranges of them
        keys: columns to read of parquet files
        max_line_bytes: longest line, or text that is a file, in uncompressed bytes; of parquet files there is no limit

    Raises:
        DataError: a line is longer, or a file cannot be read.
    """
    for file in files:
        source = _whole(file) if isinstance(file, Path) else file
        path = Path(source.path)
        kind = format_of(path)
        if kind is FileFormat.PARQUET:
            batches = _parquet_batches(path, keys)
        elif kind is FileFormat.TEXT:
            batches = _text_batches(path, max_line_bytes)
        elif path.suffix in COMPRESSED:
            batches = _archive_batches(path, max_line_bytes)
        else:
            batches = _range_batches(source, max_line_bytes)
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            logger.warning("skipped: %s: the file is empty", source.path)


def _whole(path: Path) -> FileRange:
    with _naming_errors(path):
        return FileRange(str(path), 0, path.stat().st_size)


def _range_batches(whole: FileRange, max_line_bytes: int) -> Iterator[LineBatch]:
    start = whole.start
    while start < whole.stop:
        size = min(BATCH_BYTES, max(-(-BATCH_BYTES // _SMALLEST_FRACTION), (whole.stop - start) // _LAST_BATCHES))
        stop = min(start + size, whole.stop)
        source = FileRange(whole.path, start, stop)
        at = stop - whole.start
        yield LineBatch(whole.path, source=source, limit=whole.stop, position=at, max_line_bytes=max_line_bytes)
        start = stop


def _archive_batches(path: Path, max_line_bytes: int) -> Iterator[LineBatch]:
    first, rest = 1, []
    with _naming_errors(path, lambda: first), open(path, "rb", buffering=1 << 20) as raw:
        stream = open_stream(path, raw)
        while chunk := stream.read(BATCH_BYTES):
            end = chunk.rfind(b"\n") + 1
            rest.append(chunk[:end] if end else chunk)
            if not end:
                _refuse_longer(sum(map(len, rest)), max_line_bytes, f"{path}:{first}")
                continue
            content, rest = b"".join(rest), [chunk[end:]]
            yield LineBatch(str(path), first, content, position=raw.tell())
            first += content.count(b"\n")
    if content := b"".join(rest):
        yield LineBatch(str(path), first, content)


def _text_batches(path: Path, max_line_bytes: int) -> Iterator[LineBatch]:
    with _naming_errors(path, lambda: 1), open(path, "rb") as raw:
        content = open_stream(path, raw).read(max_line_bytes + 1)
        _refuse_longer(len(content), max_line_bytes, str(path))
    if content:
        yield LineBatch(str(path), content=content, format=FileFormat.TEXT)


def _parquet_batches(path: Path, keys: Sequence[str]) -> Iterator[LineBatch]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading parquet needs the package pyarrow: pip install pyarrow (extra [parquet])"
        ) from error
    first, total = 1, path.stat().st_size
    with _naming_errors(path, lambda: first), pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if missing := [key for key in keys if key not in names]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {names[:8]} (choose with --json-keys)")
        for batch in table.iter_batches(batch_size=256, columns=list(keys)):
            rows = [list(row) for row in zip(*(batch.column(key).to_pylist() for key in keys), strict=True)]
            done = total * (first + len(rows)) // max(1, table.metadata.num_rows)
            yield LineBatch(str(path), first, rows=rows, format=FileFormat.PARQUET, position=done)
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


def _file_and_line(batch: LineBatch, number: int, begin: int) -> str:
    """file:line, for a message. The lines before byte ``begin``, at which the batch starts, are counted only here."""
    if begin:
        with open(batch.path, "rb") as stream:
            while begin and (chunk := stream.read(min(begin, 1 << 22))):
                number += chunk.count(b"\n")
                begin -= len(chunk)
    return f"{batch.path}:{number}"


def _texts_at(text: str, at: int, bound: int, keys: Sequence[str]) -> list[str] | None:
    """Parses the line text[at:bound] as ``_parse_line`` does, faster; None if there is anything unusual about it."""
    try:
        record, end = _DECODER.raw_decode(text, at)  # in place: cutting lines out first would copy everything once more
        texts = [record[key] for key in keys]
        if type(record) is not dict or end != bound or not all(type(value) is str for value in texts):
            return None
        for value in texts:
            if not value.isascii():  # a flag of the string, and free
                value.encode("utf-8")  # an escape may have brought half of a surrogate pair
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return texts


def _lines_of(content: bytes, keys: Sequence[str]) -> Iterator[list[str] | bytes]:
    """The texts of each line, or the line itself, without its end, where ``_parse_line`` is needed."""
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n")
    at, failures = 0, 0
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:  # to be found by its line
        yield from content.removesuffix(b"\n").split(b"\n")
        return
    while at < len(text):
        bound = text.find("\n", at)
        bound = bound if bound >= 0 else len(text)
        # each failure costs a look at the whole batch: the decoder's error counts the lines before it
        texts = _texts_at(text, at, bound, keys) if failures < _MAX_FAILURES else None
        failures += texts is None
        yield text[at:bound].encode("utf-8") if texts is None else texts
        at = bound + 1


def parse_batch(batch: LineBatch, keys: Sequence[str], skip_malformed: bool = False) -> ParsedBatch:
    """Parses the documents of a batch.

    Args:
        batch: one of those that ``read_batches`` yields
        keys: of the texts in each JSON object, or the columns
        skip_malformed: whether malformed lines are noted and skipped

    Raises:
        DataError: a line is malformed (names file and line), or the file has shrunk or cannot be read any more.
    """
    begin, content = 0, batch.content
    if batch.source is not None:
        with _naming_errors(Path(batch.path)):
            begin, content = read_lines(
                batch.path, batch.source.start, batch.source.stop, batch.limit, _LINE_BYTES, batch.max_line_bytes
            )
    if content is None:
        entries: Iterable[Any] = batch.rows or []
        size = sum(len(value) for row in entries for value in row if isinstance(value, str))
    else:
        entries = [content] if batch.format is FileFormat.TEXT else _lines_of(content, keys)
        size = len(content)
    parsed = ParsedBatch(num_bytes=size)
    documents, is_json = parsed.documents, batch.format is FileFormat.JSON_LINES
    for number, entry in enumerate(entries, start=batch.first_line):
        if is_json and type(entry) is list:
            documents.append(entry)
            continue
        try:
            documents.append(_parse_entry(entry, keys, batch.format, is_first=number == 1 and not begin))
        except ValueError as error:
            message = f"{_file_and_line(batch, number, begin)}: {error}"
            if not skip_malformed:
                raise DataError(f"{message}; {_SKIP_HINT}") from error
            parsed.malformed.append(message)
    return parsed


def _parse_entry(entry: Any, keys: Sequence[str], kind: FileFormat, *, is_first: bool) -> list[str]:
    """Texts of a line, a row or a file. Raises ValueError with the reason."""
    if kind is FileFormat.PARQUET:
        return [_checked_text(key, value) for key, value in zip(keys, entry, strict=True)]
    if is_first:
        entry = entry.removeprefix(b"\xef\xbb\xbf")  # byte-order mark of some editors
    return (_parse_text if kind is FileFormat.TEXT else _parse_line)(entry, keys)


def read_documents(
    paths: Iterable[Path | FileRange],
    key: str = "text",
    skip_malformed: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
    show_progress: Callable[[float, int], None] | None = None,
) -> Iterator[str]:
    """Yields the texts of all documents, in order. Logs a warning with the number of skipped lines, if any.

    Args:
        paths: input files
        key: of the text in each JSON object, or the column
        skip_malformed: whether malformed lines are skipped
        max_line_bytes: longest line, or text that is a file
        show_progress: called after each batch with the fraction of the files and the documents that have been read

    Raises:
        DataError: a line is malformed or longer, a file is unreadable, or there is no document at all.
    """
    sources = [_whole(path) if isinstance(path, Path) else path for path in paths]
    sizes = [source.stop - source.start for source in sources]
    documents = malformed = 0
    batches = (
        (i, batch) for i, source in enumerate(sources) for batch in read_batches([source], [key], max_line_bytes)
    )
    for i, batch in batches:
        parsed = parse_batch(batch, [key], skip_malformed)
        documents += len(parsed.documents)
        malformed += len(parsed.malformed)
        for (text,) in parsed.documents:
            yield text
        if show_progress is not None:
            show_progress((sum(sizes[:i]) + batch.position) / max(1, sum(sizes)), documents)
    if malformed:
        logger.warning("%d malformed lines skipped", malformed)
    if not documents:
        raise DataError(f"no documents in the input ({malformed} malformed lines skipped)")
