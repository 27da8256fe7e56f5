"""Bytes of input files: those of .gz and .zst files uncompressed, of others the lines of a range."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from megatron.optimus.data.errors import DataError

COMPRESSED = (".gz", ".zst")


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


def open_stream(path: Path, raw: BinaryIO) -> BinaryIO:
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


def read_lines(path: str, start: int, stop: int, limit: int, step: int) -> tuple[int, bytes]:
    """(where the first line begins, all lines) of those that begin in bytes [``start``, ``stop``) of a file.

    The last of them ends by ``limit``; for its end ``step`` bytes beyond ``stop`` are read at once, then twice as many,
    and so on. Raises EOFError for a file that is shorter, OSError for one that cannot be read.
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
        pieces, at = [content[first:]], begin + len(content)
        while at < limit and not pieces[-1].endswith(b"\n"):
            step *= 2
            chunk = _pread(stream.fileno(), at, min(limit, at + step))
            pieces.append(chunk[: chunk.find(b"\n") + 1] or chunk)
            at += len(chunk)
        return begin + first, b"".join(pieces)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    content = os.pread(descriptor, stop - start, start)
    while len(content) < stop - start:
        more = os.pread(descriptor, stop - start - len(content), start + len(content))
        if not more:
            raise EOFError(f"it has shrunk to {start + len(content)} bytes since its size was looked up")
        content += more
    return content
