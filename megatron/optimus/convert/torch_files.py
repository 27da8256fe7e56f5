"""Files of torch.save: read by deepspeed_ext's importer, the only caller of torch.load, and written here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import ShardItem, tensor_bytes
from megatron.optimus.platform.files import sync_directory


def _importer() -> ModuleType:
    """Brings DeepSpeed, for which only those shall wait who have such files. Its log takes the stream that is standard
    output at this moment, where programs print their results.
    """
    with redirect_stdout(sys.stderr):
        from deepspeed_ext import torch_files
    return torch_files


def read_torch(path: Path) -> Any:
    """What torch.save wrote, with memory-mapped tensors on the CPU. Raises CheckpointError naming file and remedy."""
    try:
        return _importer().read_torch(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def check_bytes(path: Path) -> None:
    """Reads the whole file and compares the CRC-32 that torch.save left. Raises CheckpointError when bytes changed."""
    try:
        _importer().check_bytes(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


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
