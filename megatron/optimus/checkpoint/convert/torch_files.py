"""Files of torch.save: the only place that calls torch.load, and it never lets a file run code.

Pickle can name any function. Here tensors and plain containers are what they are, known bookkeeping classes (arguments,
loss scalers, enums, random states) become empty shells, and every other name is refused before anything is built.
Tensors are mapped, not read, and the archive must be uncompressed, so a small file cannot become a large allocation.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.optimus.checkpoint.commit import sync_directory
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import ShardItem, check_regular, tensor_bytes

_MAX_PICKLE_BYTES = 1 << 28
_CHUNK = 1 << 22
# Their content is bookkeeping, never a tensor of the model.
_SHELLS = re.compile(
    r"argparse\.Namespace|_codecs\.encode|_io\.BytesIO|collections\.\w+|pathlib\.\w+"
    r"|(deepspeed|megatron|numpy|transformer_engine)(\.\w+)+"
)


class Shell:
    """Stands in for an object of a class that is not loaded; keeps the attributes the file gives it."""

    def __new__(cls, *_: Any, **__: Any) -> Shell:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})


def read_torch(path: Path) -> Any:
    """What torch.save wrote, with memory-mapped tensors on the CPU. Raises CheckpointError naming file and reason."""
    _check_archive(path)
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in named if not _SHELLS.fullmatch(name)]
        if foreign:
            raise CheckpointError(
                f"{path}: refused: it names {', '.join(sorted(foreign)[:5])}, which is neither a tensor nor known "
                "bookkeeping; a checkpoint must not contain code"
            )
        with torch.serialization.safe_globals([(Shell, name) for name in named]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler raises whatever the bytes provoke
        reason = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {reason}") from error


def _check_archive(path: Path) -> None:
    check_regular(path)
    size = path.stat().st_size
    with _archive(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
                raise CheckpointError(f"{path}: {entry.filename} is compressed; torch.save does not compress")
            if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path}: {entry.filename} has {entry.file_size} bytes of structure")


def check_bytes(path: Path) -> None:
    """Reads the whole file and compares the CRC-32 that torch.save left. Raises CheckpointError when bytes changed."""
    with _archive(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:  # reading to the end checks
                while file.read(_CHUNK):
                    pass


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not a file of torch.save in its zip format (torch >= 1.6): {error}"
        ) from error


def write_torch(path: Path, content: Any) -> None:
    """torch.save of a new file, synced to the disk."""
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


class Spool:
    """Tensors on disk that behave as if they were in memory, for files that torch.save must write in one go.

    Every tensor is written to a scratch file as it comes and mapped back, so one at a time is held in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".spool"

    def collect(self, items: Iterable[ShardItem]) -> dict[str, torch.Tensor]:
        """The items' tensors by key, each with a storage of its own. Valid until ``close``."""
        placed: list[tuple[ShardItem, int]] = []
        with open(self._path, "wb") as file:
            for item in items:
                tensor = item.read()
                if tensor.dtype != item.dtype or tensor.numel() * tensor.itemsize != item.num_bytes:
                    raise CheckpointError(f"{item.key}: announced {item.dtype} {item.shape}, got {tensor.dtype}")
                file.write(b"\0" * (-file.tell() % 64))
                placed.append((item, file.tell()))
                file.write(tensor_bytes(tensor))
        result = {}
        for item, offset in placed:
            mapped = np.memmap(self._path, dtype=np.uint8, mode="c", offset=offset, shape=(item.num_bytes,))
            result[item.key] = torch.from_numpy(mapped).view(item.dtype).view(item.shape)
        return result

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)
