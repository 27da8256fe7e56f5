"""Reads files of torch.save without running code from them; the only module that calls torch.load.

A pickle can name any function. Here tensors and plain containers are loaded; known bookkeeping classes (arguments, loss
scalers, enums, random states) become empty ``OpaqueObject`` objects with their attributes; any other name raises before
anything is built. Tensors are memory-mapped and the archive must be uncompressed, so a small file cannot become a large
allocation. The checksum of the structure is compared before torch reads it; ``check_bytes`` compares those of the
tensors, for which it has to read them. The converters of megatron.optimus use this module too.
"""

from __future__ import annotations

import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Classes that become an OpaqueObject; they hold bookkeeping, never a tensor of the model.
_SHELLS = re.compile(
    r"argparse\.Namespace|_codecs\.encode|_io\.BytesIO|collections\.\w+|pathlib\.\w+"
    r"|(deepspeed|megatron|numpy|transformer_engine)(\.\w+)+"
)
_MAX_PICKLE_BYTES = 1 << 28  # torch reads the pickle whole before any name can be checked
_CHUNK = 1 << 22
_REMEDY = "it is damaged, or no file of torch.save's zip format; copy it again, or take another checkpoint"


class OpaqueObject:
    """Placeholder for an object of a class that is not loaded, with the attributes that the file gives it."""

    def __new__(cls, *_: Any, **__: Any) -> OpaqueObject:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})


def read_torch(path: Path) -> Any:
    """Returns what torch.save wrote, with tensors memory-mapped on the CPU.

    Raises:
        ValueError: the file is missing, damaged, compressed, or names classes other than bookkeeping; the message names
            file, reason and remedy.
    """
    with _archive(path) as archive:
        for entry in archive.infolist():
            _check_entry(entry, path.stat().st_size)
        for entry in archive.infolist():
            if not re.search(r"/data/\d+$", entry.filename):
                _read_through(archive, entry)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = sorted(name for name in named if not _SHELLS.fullmatch(name))
        if not foreign:
            with torch.serialization.safe_globals([(OpaqueObject, name) for name in named]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    raise ValueError(
        f"{path} is refused: it names {', '.join(foreign[:5])}, which is neither a tensor nor known bookkeeping; a "
        "checkpoint must not contain code: save it again without such objects"
    )


def check_bytes(path: Path) -> None:
    """Reads the whole file and compares every CRC-32 of torch.save. Raises ValueError as ``read_torch`` does."""
    with _archive(path) as archive:
        for entry in archive.infolist():
            _check_entry(entry, path.stat().st_size)
            _read_through(archive, entry)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens the file; any exception inside becomes a ValueError."""
    try:
        mode = (path.stat() if _is_of_hub(path) else path.lstat()).st_mode
    except OSError as error:
        raise ValueError(f"{path} does not exist or cannot be reached ({error.strerror}); copy it again") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file (links are not followed inside a checkpoint); put a copy there")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Exception as error:  # zipfile's own and the unpickler's are of any class
        reason = str(error).strip().split("\n")[0][:160] or "it ends too early"
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {reason}; {_REMEDY}") from error


def _is_of_hub(path: Path) -> bool:
    """Whether a path is a link of huggingface_hub's cache: REPOSITORY/snapshots/REVISION/... to REPOSITORY/blobs.

    Such a link leads into the same download; any other might lead to any file of the machine.
    """
    folders, target = path.parent.resolve().parents, path.resolve()
    return any(one.name == "snapshots" and target.parent == one.parent / "blobs" for one in folders)


def _check_entry(entry: zipfile.ZipInfo, size: int) -> None:
    """Raises ValueError for an entry that could take more memory than the file has bytes."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
        raise ValueError(f"{entry.filename} is compressed ({entry.file_size} bytes); torch.save does not compress")
    if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
        raise ValueError(f"{entry.filename} has {entry.file_size} bytes of structure, the limit is {_MAX_PICKLE_BYTES}")


def _read_through(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Reads an entry to its end, where zipfile compares the checksum."""
    with archive.open(entry) as file:
        while file.read(_CHUNK):
            pass
