"""Files of torch.save: the only place of this package that calls torch.load, and no file can make it run code.

Pickle can name any function. Here tensors and plain containers are what they are, DeepSpeed's and other known
bookkeeping classes become empty shells that keep their attributes, and every other name is refused. Tensors are mapped,
not read, and the archive must be uncompressed, so a small file cannot become a large allocation. The converters of
megatron.optimus follow the same rules in code of their own: this package knows nothing of them, and they must start
without importing DeepSpeed.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

_BOOKKEEPING = re.compile(r"argparse\.Namespace|pathlib\.\w+|_codecs\.encode|(deepspeed|numpy)(\.\w+)+")
_MAX_PICKLE_BYTES = 1 << 28  # of structure: torch reads it whole, before anything can be refused


class Shell:
    """Stands in for an object of a class that is not loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Shell:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})


def read_torch(path: Path) -> Any:
    """What torch.save wrote, tensors mapped into memory on the CPU. Raises ValueError naming file and reason."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        _check_archive(path)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = sorted(name for name in named if not _BOOKKEEPING.fullmatch(name))
        if not foreign:
            with torch.serialization.safe_globals([(Shell, name) for name in named]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler raises whatever the bytes provoke
        reason = str(error).strip().split("\n")[0][:300]
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
    raise ValueError(f"{path} is refused: it names {', '.join(foreign[:5])}; a checkpoint must not contain code")


def _check_archive(path: Path) -> None:
    """Raises ValueError for an archive that could ask for more memory than the file has bytes."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
                raise ValueError(
                    f"{entry.filename} is compressed ({entry.file_size} bytes); torch.save does not compress"
                )
            if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
                raise ValueError(
                    f"{entry.filename} has {entry.file_size} bytes of structure, the limit is {_MAX_PICKLE_BYTES}"
                )
