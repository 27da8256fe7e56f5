"""Files of torch.save: read by deepspeed_ext's importer, the only caller of torch.load, and written here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.optimus.checkpoint.commit import sync_directory
from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.shards import ShardItem, tensor_bytes


def read_torch(path: Path) -> Any:
    """What torch.save wrote, with memory-mapped tensors on the CPU. Raises CheckpointError naming file and remedy."""
    from deepspeed_ext.torch_files import read_torch as read  # brings DeepSpeed: only those pay who have such files

    try:
        return read(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def check_bytes(path: Path) -> None:
    """Reads the whole file and compares the CRC-32 that torch.save left. Raises CheckpointError when bytes changed."""
    from deepspeed_ext.torch_files import check_bytes as check  # as above

    try:
        check(path)
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
