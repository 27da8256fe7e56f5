"""Files of torch.save: written here, and read by deepspeed_ext's importer, the only caller of torch.load."""

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
from megatron.optimus.checkpoint.shards import WriteItem, tensor_bytes
from megatron.optimus.platform.files import sync_directory


def _importer() -> ModuleType:
    """Imports DeepSpeed, which takes seconds, only where there are such files.

    DeepSpeed logs to the stream that is standard output while it is imported, and there programs print their results.
    """
    with redirect_stdout(sys.stderr):
        from deepspeed_ext import torch_files
    return torch_files


def read_torch(path: Path) -> Any:
    """Reads what torch.save wrote; tensors are memory-mapped, on the CPU. Raises CheckpointError with the remedy."""
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
    """Writes a new file by torch.save and syncs it to the disk."""
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


class ScratchFile:
    """Keeps tensors in a scratch file on disk, for files that torch.save must write in one go.

    Every tensor is written as it comes and mapped back, so one at a time is held in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ".spool"

    def collect(self, items: Iterable[WriteItem]) -> dict[str, torch.Tensor]:
        """Writes items; returns their tensors by key, each with a storage of its own, valid until ``close``."""
        placed: list[tuple[WriteItem, int]] = []
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
        """Removes the scratch file."""
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)
