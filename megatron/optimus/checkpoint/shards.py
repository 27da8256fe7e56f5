"""Safetensors files: a writer that streams, and a reader that trusts nothing but the manifest.

The format: 8 bytes little-endian header length, JSON header, raw data. The library's own writer keeps the whole file in
memory and hides the operating system's error, but a full disk must be told from a bug; so files are written here.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.untrusted import check_regular, parse_json

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in _TORCH_DTYPES.items()}
_WIDEST = max(DTYPE_BYTES.values())

# Reads and writes past the page cache, and how a file system refuses them.
O_DIRECT = getattr(os, "O_DIRECT", 0)
ALIGNED = max(4096, mmap.PAGESIZE)  # of addresses, offsets and lengths; no disk here asks for more
DIRECT_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_DIRECT_BYTES = 1 << 20  # smaller reads gain from what the kernel reads ahead


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a torch dtype. Raises CheckpointError for one that cannot be stored."""
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(f"{dtype} cannot be stored; supported: {', '.join(map(str, _DTYPE_NAMES))}")
    return _DTYPE_NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    if name not in _TORCH_DTYPES:
        raise CheckpointError(f"dtype {name!r} is not supported; supported: {', '.join(_TORCH_DTYPES)}")
    return _TORCH_DTYPES[name]


@dataclass(frozen=True)
class WriteItem:
    """A tensor to write. ``read`` is called once, when it is written, and may return the tensor on any device."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file, without header."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a tensor, on the CPU; shares memory where it can."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def write_shard(path: Path, items: Iterable[WriteItem], metadata: dict[str, str] | None = None) -> dict[str, str]:
    """Writes a new safetensors file, one tensor in memory at a time, and syncs it to the disk.

    Args:
        path: the file, which must not exist.
        items: what to write; wide dtypes come first in the file.
        metadata: the header's ``__metadata__``.

    Returns:
        The xxh3-128 of every tensor's bytes by key, 32 hex digits each.

    Raises:
        OSError: as the operating system gives it.
        CheckpointError: two items share a key, or an item delivers another dtype or size than it announced.
    """
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # stable; keeps every tensor aligned to its dtype
    header = shard_header([(item.key, dtype_name(item.dtype), item.shape) for item in ordered], metadata)
    hashes: dict[str, str] = {}
    with open(path, "xb") as file:
        file.write(header)
        for item in ordered:
            tensor = item.read()
            if tensor.dtype != item.dtype or tensor.numel() != math.prod(item.shape):
                raise CheckpointError(
                    f"{item.key}: announced {item.dtype} {item.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
            data = tensor_bytes(tensor)
            hashes[item.key] = xxhash.xxh3_128_hexdigest(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashes


def shard_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """Builds the first bytes of a safetensors file: length and header.

    Args:
        tensors: (key, dtype name, shape) in the order in which their data follow.
        metadata: the header's ``__metadata__``.

    Raises:
        CheckpointError: two tensors share a key.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for key, dtype, shape in tensors:
        if key in header:
            raise CheckpointError(f"two tensors have the key {key!r}")
        stop = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HeaderEntry(NamedTuple):
    """One entry of a safetensors header. ``offset`` counts bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ShardFile:
    """An open safetensors file of a checkpoint: where its tensors lie, and their raw bytes.

    Args:
        path: the file.
        num_bytes: its size as the manifest says.
        max_header: a longer header is refused unread.

    Raises:
        CheckpointError: not a regular file of that size with a valid header.
    """

    def __init__(self, path: Path, num_bytes: int, max_header: int) -> None:
        self.path = path
        check_regular(path, num_bytes)
        flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._direct: int | None = os.open(path, flags | O_DIRECT)
        except OSError:  # then the file is read through the page cache
            self._direct = None
        self._is_direct = self._direct is not None
        try:
            self.tensors = self._read_header(num_bytes, max_header)
        except BaseException:
            self.close()
            raise

    def _read_header(self, num_bytes: int, max_header: int) -> dict[str, HeaderEntry]:
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(max_header, num_bytes - 8):
            raise CheckpointError(f"{self.path}: header is damaged: it claims {length} bytes")
        header = parse_json(self._bytes(8, length), f"{self.path}: header is damaged")
        header.pop("__metadata__", None)
        begin = 8 + length
        tensors = {}
        for key, item in header.items():
            try:
                start, stop = item["data_offsets"]
                entry = HeaderEntry(str(item["dtype"]), tuple(item["shape"]), begin + start, stop - start)
                good = 0 <= start <= stop <= num_bytes - begin
                good = good and math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] == entry.num_bytes
            except (TypeError, ValueError, KeyError):
                good = False
            if not good:
                raise CheckpointError(f"{self.path}: header is damaged: entry {key[:200]!r}")
            tensors[key] = entry
        return tensors

    def _bytes(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills ``buffer`` with the file's bytes from ``offset`` on. Several threads may call it."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}, more was expected")
            done += count

    def read_pages(self, buffer: memoryview, offset: int, count: int) -> int:
        """Reads bytes into a buffer, past the page cache where the file system allows that and it pays.

        Args:
            buffer: begins on a page and has two pages more than ``count`` bytes need.
            offset: of the first byte in the file.
            count: bytes to read.

        Returns:
            The position in ``buffer`` at which they begin.
        """
        low, high = offset // ALIGNED * ALIGNED, -(-(offset + count) // ALIGNED) * ALIGNED
        if self._is_direct and self._direct is not None and count >= _DIRECT_BYTES and offset % _WIDEST == 0:
            try:
                found = os.preadv(self._direct, [buffer[: high - low]], low)
            except OSError as error:
                if error.errno not in (*DIRECT_REFUSALS, errno.EFAULT):  # the last: memory that a driver has mapped
                    raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
                self._is_direct, found = False, 0
            if found >= offset - low + count:  # else the file is shorter, which the read below reports
                return offset - low
        self.read_into(buffer[:count], offset)
        return 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)
