"""Documents from JSON-lines files: one JSON object a line, the text under a key. Plain, .gz and .zst.

Reading is in two halves, so that parsing can run in other processes: ``read_batches`` cuts files into batches of raw
lines that know where they come from; ``parse_batch`` turns a batch into documents.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megatron.optimus.data.errors import DataError

logger = logging.getLogger("optimus")

BATCH_BYTES = 1 << 20
BATCH_LINES = 4096
_SKIP_HINT = "repair the line, or pass --skip-malformed to leave such lines out"


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file; ``first_line`` counts from 1."""

    path: str
    first_line: int
    lines: list[bytes]
    num_bytes: int


@dataclass
class ParsedBatch:
    """``documents[i]`` holds the texts of one line, one per key; ``malformed`` a message for each line left out."""

    documents: list[list[str]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


def expand_inputs(patterns: Iterable[str]) -> list[Path]:
    """Files named by paths or globs: in the order given, the matches of one glob sorted.

    Raises DataError if a pattern matches no file, or a file is named twice (its documents would count twice).
    """
    paths: list[Path] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            what = "a folder, give its files, such as " + repr(f"{pattern}/*.jsonl") if matches else "no such file"
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


def _open_lines(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from error
        return io.BufferedReader(_ZstReader(open(path, "rb"), zstandard), 1 << 20)
    return open(path, "rb", buffering=1 << 20)


def _read_lines(path: Path) -> Iterator[bytes]:
    """Lines without their line end. Raises DataError, with the line reached, when the file cannot be read on."""
    number = 0
    try:
        with _open_lines(path) as stream:
            for line in stream:
                number += 1
                yield line.rstrip(b"\r\n")
    except DataError:
        raise
    except Exception as error:
        # zstandard's error type cannot be named here, as the package is optional
        if not isinstance(error, (OSError, EOFError, zlib.error)) and type(error).__name__ != "ZstdError":
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{path}:{number + 1}: cannot read on: {reason}; the file is damaged or incomplete") from error


def read_batches(paths: Iterable[Path]) -> Iterator[LineBatch]:
    """Batches of about ``BATCH_BYTES`` uncompressed bytes, in file order. Raises DataError for a file without lines."""
    for path in paths:
        lines: list[bytes] = []
        num_bytes, first = 0, 1
        for line in _read_lines(path):
            lines.append(line)
            num_bytes += len(line) + 1
            if num_bytes >= BATCH_BYTES or len(lines) >= BATCH_LINES:
                yield LineBatch(str(path), first, lines, num_bytes)
                lines, num_bytes, first = [], 0, first + len(lines)
        if lines:
            yield LineBatch(str(path), first, lines, num_bytes)
        elif first == 1:
            raise DataError(f"{path}: the file is empty; leave it out of the input")


def _shown(line: bytes) -> str:
    text = line[:40].decode("utf-8", errors="replace")
    return repr(text + ("..." if len(line) > 40 else ""))


def _parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Texts of one line. Raises ValueError with the reason."""
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}): {_shown(line)}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        raise ValueError(f"not JSON that can be read ({error}): {_shown(line)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, expected an object: {_shown(line)}")
    texts = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; the object has {sorted(record)[:8]} (choose with --json-keys)")
        text = record[key]
        if not isinstance(text, str):
            raise ValueError(f"key {key!r} holds a {type(text).__name__}, expected a string")
        if b"\\ud" in line or b"\\uD" in line:  # only an escape can bring half of a surrogate pair
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"key {key!r} holds half of a surrogate pair at character {error.start}") from error
        texts.append(text)
    return texts


def parse_batch(batch: LineBatch, keys: Sequence[str], skip_malformed: bool = False) -> ParsedBatch:
    """The batch's documents. A malformed line raises DataError with file and line, or is noted if they are skipped."""
    parsed = ParsedBatch()
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901  the byte-order mark some editors put first
        try:
            parsed.documents.append(_parse_line(line, keys))
        except ValueError as error:
            message = f"{batch.path}:{number}: {error}"
            if not skip_malformed:
                raise DataError(f"{message}; {_SKIP_HINT}") from error
            parsed.malformed.append(message)
    return parsed


def read_documents(paths: Iterable[Path], key: str = "text", skip_malformed: bool = False) -> Iterator[str]:
    """Texts of all documents, in order. Warns with the number of lines left out, if any.

    Raises DataError for a malformed line (unless skipped), an unreadable or empty file, or no document at all.
    """
    documents = malformed = 0
    for batch in read_batches(paths):
        parsed = parse_batch(batch, [key], skip_malformed)
        documents += len(parsed.documents)
        malformed += len(parsed.malformed)
        for (text,) in parsed.documents:
            yield text
    if malformed:
        logger.warning("%d malformed lines left out", malformed)
    if not documents:
        raise DataError(f"no documents in the input ({malformed} malformed lines left out)")
