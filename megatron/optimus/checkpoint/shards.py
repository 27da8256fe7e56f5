"""Safetensors files: a streaming writer, and a reader that trusts nothing but the manifest.

The writer is our own because the library's keeps the whole file in memory and hides the operating system's error
(a full disk must be told from a bug). The format: 8 bytes little-endian header length, JSON header, raw data.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from megatron.optimus.checkpoint import direct
from megatron.optimus.checkpoint.direct import ALIGNED
from megatron.optimus.checkpoint.errors import CheckpointError

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
class ShardItem:
    """One tensor to write: ``read`` is called once, when its turn has come, and may return it on any device."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a tensor, on the CPU; shares memory where it can."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def write_shard(path: Path, items: Iterable[ShardItem], metadata: dict[str, str] | None = None) -> dict[str, str]:
    """Writes a new safetensors file, one tensor in memory at a time, and syncs it to the disk.

    Returns the xxh3-128 of every tensor's bytes by key. Raises OSError as the operating system gives it, and
    CheckpointError when two items share a key or an item does not deliver what it announced.
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
    """The first bytes of a safetensors file whose (key, dtype name, shape) follow each other in this order.

    Raises CheckpointError when two tensors share a key.
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


def read_small_file(path: Path, limit: int) -> bytes:
    """A regular file's bytes; refuses links, special files and anything above ``limit`` bytes."""
    check_regular(path)
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path}: {size} bytes, limit {limit}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def check_regular(path: Path, size: int | None = None) -> None:
    """Raises CheckpointError unless ``path`` itself (not what it links to) is a file, of ``size`` bytes if given."""
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path}: not a regular file (links are not followed inside a checkpoint); put a copy there, or let "
            "huggingface_hub download it with local_dir"
        )
    if size is not None and status.st_size != size:
        raise CheckpointError(f"{path}: has {status.st_size} bytes, the manifest says {size}")


class StoredTensor(NamedTuple):
    """One entry of a safetensors header. ``offset``: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class ShardFile:
    """An open safetensors file of ours: where its tensors lie, and their raw bytes.

    ``num_bytes``: the file's size as the manifest says; ``max_header``: more is refused unread. Raises CheckpointError
    for anything that is not a regular file of that size with a header that makes sense.
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
            self._direct: int | None = os.open(path, flags | direct.FLAG)
        except OSError:  # then the file is read through the page cache
            self._direct = None
        self._is_direct = self._direct is not None
        try:
            self.tensors = self._read_header(num_bytes, max_header)
        except BaseException:
            self.close()
            raise

    def _read_header(self, num_bytes: int, max_header: int) -> dict[str, StoredTensor]:
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
                entry = StoredTensor(str(item["dtype"]), tuple(item["shape"]), begin + start, stop - start)
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
        """Fills ``buffer`` with the file's bytes from ``offset`` on. May be called from several threads."""
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
        """Reads ``count`` bytes of the file from ``offset`` on into ``buffer``; returns at which byte they begin there.

        Past the page cache where the file system can and it pays; ``buffer`` begins on a page and has two to spare.
        """
        low, high = offset // ALIGNED * ALIGNED, -(-(offset + count) // ALIGNED) * ALIGNED
        if self._is_direct and self._direct is not None and count >= _DIRECT_BYTES and offset % _WIDEST == 0:
            try:
                found = os.preadv(self._direct, [buffer[: high - low]], low)
            except OSError as error:
                if error.errno not in (*direct.REFUSALS, errno.EFAULT):  # the last: memory that a driver has mapped
                    raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
                self._is_direct, found = False, 0
            if found >= offset - low + count:  # else the file is shorter, which the other way reports
                return offset - low
        self.read_into(buffer[:count], offset)
        return 0

    def close(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)


class ShardReader:
    """An open safetensors file of anybody. Tensors are memory-mapped: only what is touched is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():  # a pipe would keep us waiting
            raise CheckpointError(f"{path}: not a regular file")
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: header is damaged: {error}; copy the file again") from error
        self.keys = frozenset(self._file.keys())

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """(dtype name, shape) of a tensor, from the header alone."""
        view = self._file.get_slice(key)
        return view.get_dtype(), tuple(view.get_shape())

    def read(self, key: str) -> torch.Tensor:
        try:
            return self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {key}: cannot be read: {error}; copy the file again") from error


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinities. Raises CheckpointError, opened by ``source``."""
    try:
        body = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {str(error)[:300]}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{source}: must be a JSON object, is {type(body).__name__}")
    return body


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a double")
    return value
