"""Documents from files: JSON lines (the text under a key), parquet (in a column), plain text (a file is a document).

JSON lines and text may be compressed (.gz, .zst). Work is in two halves, the second of which can run in other
processes: ``read_batches`` cuts files into batches that know where they come from; ``parse_batch`` turns a batch into
documents. Of uncompressed JSON lines a batch is a range of bytes, which ``parse_batch`` reads: no line goes through a
pipe.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.raw_bytes import COMPRESSED, open_stream, read_lines

logger = logging.getLogger("optimus")

BATCH_BYTES = 1 << 20
_BATCHES_LEFT = 16  # the last batches of a range are smaller, so that workers end together,
_SMALLEST = 4  # down to a quarter
_LINE_BYTES = 1 << 14  # read beyond a batch for the end of its last line
_TEXT = (".txt", ".md")
_IN_FOLDERS = (".jsonl", ".json", ".ndjson", ".parquet", *_TEXT)
_DECODER = json.JSONDecoder()
_UNUSUAL_LINES = 16  # of a batch that are tried the fast way
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
    """Consecutive lines (or rows, or one text) of one file: what was read of it, or where it is to be read.

    Exactly one is set: ``content``, whole lines or a text; ``rows``, the values of a parquet file's columns;
    ``source``, for the lines that begin in that range of bytes, the last of which ends by ``limit``. ``first_line``
    counts from 1, that of a ``source`` from its start. ``position``: bytes of the file's part up to the batch's end,
    for progress.
    """

    path: str
    first_line: int = 1
    content: bytes | None = None
    rows: list[list[object]] | None = None
    source: FileRange | None = None
    limit: int = 0
    format: Format = Format.JSON_LINES
    position: int = 0


@dataclass
class ParsedBatch:
    """``documents[i]`` holds the texts of one line, one per key; ``malformed`` a message for each line left out.

    ``num_bytes``: uncompressed bytes of the batch.
    """

    documents: list[list[str]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    num_bytes: int = 0


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
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


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
    if format_of(path) is not Format.JSON_LINES or path.suffix in COMPRESSED or size <= max_bytes:
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


@contextlib.contextmanager
def _readable(path: Path, reached: Callable[[], int] | None = None) -> Iterator[None]:
    """Errors of files and archives become DataErrors that name the line reached, where that is known."""
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
        place = str(path) if reached is None else f"{path}:{reached()}"
        raise DataError(f"{place}: cannot read on: {reason}; the file is damaged or incomplete") from error


def read_batches(files: Iterable[Path | FileRange], keys: Sequence[str] = ("text",)) -> Iterator[LineBatch]:
    """Batches of up to ``BATCH_BYTES`` uncompressed bytes or a line, in order. Raises DataError for an empty file."""
    for file in files:
        part = _whole(file) if isinstance(file, Path) else file
        path = Path(part.path)
        kind = format_of(path)
        if kind is Format.PARQUET:
            batches = _parquet_batches(path, keys)
        elif kind is Format.TEXT:
            batches = _text_batches(path)
        elif path.suffix in COMPRESSED:
            batches = _archive_batches(path)
        else:
            batches = _range_batches(part)
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise DataError(f"{part.path}: the file is empty; leave it out of the input")


def _whole(path: Path) -> FileRange:
    with _readable(path):
        return FileRange(str(path), 0, path.stat().st_size)


def _range_batches(part: FileRange) -> Iterator[LineBatch]:
    start = part.start
    while start < part.stop:
        size = min(BATCH_BYTES, max(-(-BATCH_BYTES // _SMALLEST), (part.stop - start) // _BATCHES_LEFT))
        stop = min(start + size, part.stop)
        source = FileRange(part.path, start, stop)
        yield LineBatch(part.path, source=source, limit=part.stop, position=stop - part.start)
        start = stop


def _archive_batches(path: Path) -> Iterator[LineBatch]:
    first, rest = 1, []
    with _readable(path, lambda: first), open(path, "rb", buffering=1 << 20) as raw:
        stream = open_stream(path, raw)
        while chunk := stream.read(BATCH_BYTES):
            end = chunk.rfind(b"\n") + 1
            rest.append(chunk[:end] if end else chunk)
            if not end:
                continue
            content, rest = b"".join(rest), [chunk[end:]]
            yield LineBatch(str(path), first, content, position=raw.tell())
            first += content.count(b"\n")
    if content := b"".join(rest):
        yield LineBatch(str(path), first, content)


def _text_batches(path: Path) -> Iterator[LineBatch]:
    with _readable(path, lambda: 1), open(path, "rb") as raw:
        content = open_stream(path, raw).read()
    if content:
        yield LineBatch(str(path), content=content, format=Format.TEXT)


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
            done = total * (first + len(rows)) // max(1, table.metadata.num_rows)
            yield LineBatch(str(path), first, rows=rows, format=Format.PARQUET, position=done)
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


def _place(batch: LineBatch, number: int, begin: int) -> str:
    """file:line. The lines before byte ``begin`` of a file that is read from there are counted now, as they matter."""
    if begin:
        with open(batch.path, "rb") as stream:
            while begin and (chunk := stream.read(min(begin, 1 << 22))):
                number += chunk.count(b"\n")
                begin -= len(chunk)
    return f"{batch.path}:{number}"


def _texts_at(text: str, at: int, bound: int, keys: Sequence[str]) -> list[str] | None:
    """What ``_parse_line`` gives, faster, for a line text[at:bound] with nothing unusual about it; else None."""
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
    at, unusual = 0, 0
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:  # to be found by its line
        yield from content.removesuffix(b"\n").split(b"\n")
        return
    while at < len(text):
        bound = text.find("\n", at)
        bound = bound if bound >= 0 else len(text)
        # each failure costs a look at the whole batch: the decoder's error counts the lines before it
        texts = _texts_at(text, at, bound, keys) if unusual < _UNUSUAL_LINES else None
        unusual += texts is None
        yield text[at:bound].encode("utf-8") if texts is None else texts
        at = bound + 1


def parse_batch(batch: LineBatch, keys: Sequence[str], skip_malformed: bool = False) -> ParsedBatch:
    """The batch's documents. A malformed line raises DataError with file and line, or is noted if they are skipped.

    Raises DataError for a file that has shrunk, or cannot be read any more.
    """
    begin, content = 0, batch.content
    if batch.source is not None:
        with _readable(Path(batch.path)):
            begin, content = read_lines(batch.path, batch.source.start, batch.source.stop, batch.limit, _LINE_BYTES)
    if content is None:
        entries: Iterable[Any] = batch.rows or []
        size = sum(len(value) for row in entries for value in row if isinstance(value, str))
    else:
        entries = [content] if batch.format is Format.TEXT else _lines_of(content, keys)
        size = len(content)
    parsed = ParsedBatch(num_bytes=size)
    documents, is_json = parsed.documents, batch.format is Format.JSON_LINES
    for number, entry in enumerate(entries, start=batch.first_line):
        if is_json and type(entry) is list:
            documents.append(entry)
            continue
        try:
            documents.append(_parse_entry(entry, keys, batch.format, is_first=number == 1 and not begin))
        except ValueError as error:
            message = f"{_place(batch, number, begin)}: {error}"
            if not skip_malformed:
                raise DataError(f"{message}; {_SKIP_HINT}") from error
            parsed.malformed.append(message)
    return parsed


def _parse_entry(entry: Any, keys: Sequence[str], kind: Format, *, is_first: bool) -> list[str]:
    """Texts of a line, a row or a file. Raises ValueError with the reason."""
    if kind is Format.PARQUET:
        return [_checked_text(key, value) for key, value in zip(keys, entry, strict=True)]
    if is_first:
        entry = entry.removeprefix(b"\xef\xbb\xbf")  # byte-order mark of some editors
    return (_parse_text if kind is Format.TEXT else _parse_line)(entry, keys)


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
