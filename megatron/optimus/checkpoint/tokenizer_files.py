"""Which files of a tokenizer may be copied out of a run, and their hashes in a checkpoint.

A manifest names its run's tokenizer by a path that anybody can have written. Copying whatever lies there would carry
files of the user who converts into the export.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.checkpoint.untrusted import read_small_file
from megatron.optimus.config.choices import TokenizerType
from megatron.optimus.config.tokenizer_files import definition_file

HASHES_FIELD = "tokenizer_files"  # of a manifest's metadata: file name -> XXH3-128 of the files of the run's tokenizer
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
IDENTITY_FIELD = "tokenizer"  # of a manifest's metadata: type, vocabulary size and fingerprint of the run's tokenizer
FOLDER = "tokenizer"  # in a checkpoint: a copy of the run's tokenizer, from which an export is made
_MAX_BYTES = 1 << 28  # of one file


def hash_files(location: str | Path | None) -> dict[str, str]:
    """Hashes the files of a tokenizer, for a manifest's metadata.

    Args:
        location: its file or folder; None for none.

    Returns:
        XXH3-128 by file name, of the file and of those of ``NAMES`` beside it. What cannot be read is left out.
    """
    if location is None:
        return {}
    path = Path(location)
    folder = path if path.is_dir() else path.parent
    found = {}
    for file in dict.fromkeys([*(folder / name for name in NAMES), *([] if path.is_dir() else [path])]):
        try:
            found[file.name] = xxhash.xxh3_128_hexdigest(read_small_file(file, _MAX_BYTES))
        except CheckpointError:
            continue
    return found


def files_of(kind: TokenizerType, location: str | Path | None) -> dict[str, Path]:
    """Finds the files of a tokenizer.

    Args:
        kind: its type.
        location: its file or folder; None for none.

    Returns:
        The files by their names in a checkpoint or an export; none where there is no such tokenizer.
    """
    if location is None or kind is TokenizerType.BYTE:
        return {}
    path = Path(location)
    file = definition_file(kind, path)
    if file is None:
        return {}
    if kind is TokenizerType.SENTENCEPIECE:
        return {"tokenizer.model": file}
    if kind is TokenizerType.TIKTOKEN:
        options = file.with_name(f"{file.name}.json")
        return {"tokenizer.tiktoken": file} | ({"tokenizer.tiktoken.json": options} if options.exists() else {})
    found = {name: file.parent / name for name in NAMES if (file.parent / name).exists()}
    return found if file.name == "vocab.json" else found | {"tokenizer.json": file}


@dataclass(frozen=True)
class CopyGuard:
    """Reads only files that may be copied into an export.

    Args:
        root: the checkpoint, or what the command line names. Files inside it may be copied, unless they or one of their
            folders inside it are links.
        hashes: XXH3-128 of files that the checkpoint recorded: its author had them already, so that copying them from
            elsewhere gives nothing away.
    """

    root: Path
    hashes: frozenset[str] = frozenset()

    @classmethod
    def of_command_line(cls, path: Path) -> CopyGuard:
        """Returns the guard of a tokenizer that the user named: its folder."""
        return cls(path if path.is_dir() else path.parent)

    @classmethod
    def of_checkpoint(cls, path: Path, hashes: Iterable[Any]) -> CopyGuard:
        """Returns the guard of the tokenizer that a checkpoint names; ``hashes`` are as its manifest has them."""
        return cls(path, frozenset(value for value in hashes if isinstance(value, str)))

    def read(self, file: Path) -> bytes:
        """Reads a file. Raises CheckpointError where it must not be copied, is a link, or is no regular file."""
        root, path = (Path(os.path.abspath(each)) for each in (self.root, file))
        if not path.is_relative_to(root):
            data = read_small_file(path, _MAX_BYTES)
            if xxhash.xxh3_128_hexdigest(data) not in self.hashes:
                raise CheckpointError(
                    f"{file}: lies outside of {self.root}, and is not the file that the checkpoint recorded, so it is "
                    "not copied; name the tokenizer with --tokenizer-model"
                )
            return data
        for folder in path.parents:
            if folder == root:
                break
            if folder.is_symlink():
                raise CheckpointError(f"{file}: {folder} is a link, and links are not followed; put a copy there")
        if path.parent == root and root.parent.name == "snapshots" and path.is_symlink():
            # huggingface_hub keeps a download's content in one folder, to which its snapshots link
            blobs, target = (root.parent.parent / "blobs").resolve(), path.resolve()
            path = target if target.parent == blobs else path
        return read_small_file(path, _MAX_BYTES)
