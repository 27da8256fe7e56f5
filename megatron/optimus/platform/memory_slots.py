"""Files in host memory that outlive the ranks: each holds one generation of one rank's training state.

    <folder>/rank-3.0, rank-3.1    two generations of rank 3
    <folder>/copy-2.0, copy-2.1    those of rank 2, which is on another node

``optimus launch`` names the folder in OPTIMUS_MEMORY_FOLDER. On one machine the names are links to anonymous memory
(memfd) that the launcher alone holds open, so that the kernel frees it however the launcher dies. On several nodes they
are files of each node's /dev/shm.

    byte 0       magic, step, bytes of the data, bytes of the index, hash of the index
    byte 4096    the data
    after them   the index: JSON of the writer's

The first 64 bytes are written last, and cleared before the data change: a file that was being written when its rank
died is not complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.platform import files

GENERATIONS = 2
DATA_START = 4096
_HEAD = struct.Struct("<8sqqq16s")
_MAGIC = b"optimus1"
_SHARED_MEMORY = "/dev/shm"
_PREFIX = "optimus-memory-"
_ABANDONED_SECONDS = 3600.0  # a folder that no live rank uses and nobody has written to for so long


@dataclass(frozen=True)
class Generation:
    """The header of a complete file."""

    step: int
    num_bytes: int  # of the data
    index: dict[str, Any]


class MemorySlot:
    """A file in host memory with one generation of a rank's training state.

    Args:
        path: the file, or a link to memory of the launcher's. A missing file is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None

    def map(self, num_bytes: int) -> mmap.mmap:
        """Reserves room for ``num_bytes`` of data and maps the file; the data begin at DATA_START.

        Raises:
            OSError: there is not so much memory.
        """
        size = DATA_START + num_bytes
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_blocks * 512 < size:
                os.posix_fallocate(self._descriptor, 0, size)  # an error now, not SIGBUS at the first write
            self._map = mmap.mmap(self._descriptor, size)
        return self._map

    def clear(self) -> None:
        """Marks the file as incomplete. Call before its data change."""
        os.pwrite(self._descriptor, bytes(_HEAD.size), 0)

    def commit(self, step: int, num_bytes: int, index: dict[str, Any]) -> None:
        """Marks the file as complete. Call after ``num_bytes`` of data have been written."""
        text = json.dumps(index).encode()
        files.write_at(self._descriptor, memoryview(text), DATA_START + num_bytes)
        head = _HEAD.pack(_MAGIC, step, num_bytes, len(text), xxhash.xxh3_128_digest(text))
        os.pwrite(self._descriptor, head, 0)

    def read(self) -> Generation | None:
        """Returns the header and index; None for an incomplete file. Does not check the hashes of the data."""
        head = _read_head(self._descriptor)
        if head is None:
            return None
        step, num_bytes, length, digest = head
        text = os.pread(self._descriptor, length, DATA_START + num_bytes)
        return Generation(step, num_bytes, json.loads(text)) if xxhash.xxh3_128_digest(text) == digest else None

    def free_bytes(self) -> tuple[int, int]:
        """Returns how many bytes its file system can still take (2^62 for no limit), and how many the file has."""
        system = os.fstatvfs(self._descriptor)
        free = system.f_bavail * system.f_frsize if system.f_blocks else 1 << 62
        return free, os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Closes the file, whose map stays valid; for one that is only read."""
        os.close(self._descriptor)

    def free(self) -> None:
        """Empties the file, and deletes it unless the launcher holds it. Invalidates the result of ``map``."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            if not self.path.is_symlink():
                self.path.unlink()


def newest_step(folder: Path | None) -> int:
    """Returns the newest step that all ranks with files in ``folder`` have complete; -1 where there is none."""
    steps: dict[str, set[int]] = {}
    for path in sorted(folder.glob("rank-*")) if folder is not None else []:
        found = steps.setdefault(path.name.partition(".")[0], set())
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                head = _read_head(descriptor)
            finally:
                os.close(descriptor)
            found |= set() if head is None else {head[0]}
    return max(set.intersection(*steps.values()), default=-1) if steps else -1


def _read_head(descriptor: int) -> tuple[int, int, int, bytes] | None:
    """Step, bytes of the data, bytes of the index and its hash."""
    data = os.pread(descriptor, _HEAD.size, 0)
    if len(data) < _HEAD.size:
        return None
    magic, *rest = _HEAD.unpack(data)
    return tuple(rest) if magic == _MAGIC else None


class AnonymousSlots:
    """Memory for the ranks of one machine, held by the launcher; the kernel frees it when the launcher ends.

    Args:
        folder: is made; gets a link for each file.
        num_ranks: on this machine.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self._descriptors = []
        for rank in range(num_ranks):
            for generation in range(GENERATIONS):
                if hasattr(os, "memfd_create"):  # Linux; elsewhere the ranks make files
                    descriptor = os.memfd_create(f"optimus rank {rank}")
                    (folder / f"rank-{rank}.{generation}").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
                    self._descriptors.append(descriptor)

    def close(self) -> None:
        """Frees the memory."""
        for descriptor in self._descriptors:
            os.close(descriptor)


# ---- folders of several nodes


def shared_folder(token: str) -> str:
    """Returns the name of a folder that every node of a launch makes in its own memory."""
    return os.path.join(_SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir(), _PREFIX + token)


def use_folder(folder: Path) -> int:
    """Makes the folder where it is missing and marks it as used while this process lives; returns a descriptor.

    Folders of launches that were killed are removed: those that nobody uses, an hour after the last write.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if folder.name.startswith(_PREFIX):
        _remove_abandoned(folder)
    descriptor = os.open(folder / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove_abandoned(own: Path) -> None:
    for other in own.parent.glob(f"{_PREFIX}*"):
        if other == own or not re.fullmatch(r"[0-9a-f]+", other.name.removeprefix(_PREFIX)):
            continue
        with contextlib.suppress(OSError):
            newest = max(path.lstat().st_mtime for path in [other, *other.iterdir()])
            if other.lstat().st_uid != os.getuid() or time.time() - newest < _ABANDONED_SECONDS:
                continue
            with open(other / "used", "rb") as used:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)
