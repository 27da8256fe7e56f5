"""Safetensors files: a streaming writer, and a reader that trusts nothing but the manifest.

The writer is our own because the library's keeps the whole file in memory and hides the operating system's error
(a full disk must be told from a bug). The format: 8 bytes little-endian header length, JSON header, raw data.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

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
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for item in ordered:
        if item.key in header:
            raise CheckpointError(f"{path.name}: two tensors have the key {item.key!r}")
        header[item.key] = {
            "dtype": dtype_name(item.dtype),
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.num_bytes],
        }
        offset += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes: dict[str, str] = {}
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
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
        raise CheckpointError(f"{path}: not a regular file (links are not followed inside a checkpoint)")
    if size is not None and status.st_size != size:
        raise CheckpointError(f"{path}: has {status.st_size} bytes, the manifest says {size}")


class ShardReader:
    """An open safetensors file. Tensors come back memory-mapped: only what is touched is read from the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: header is damaged: {error}") from error
        self.keys = frozenset(self._file.keys())

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """(dtype name, shape) of a tensor, from the header alone."""
        view = self._file.get_slice(key)
        return view.get_dtype(), tuple(view.get_shape())

    def read(self, key: str) -> torch.Tensor:
        try:
            return self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {key}: cannot be read: {error}") from error
