"""Finds out which type of tokenizer a file or folder holds, and which file defines it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron.optimus.config.choices import TokenizerType
from megatron.optimus.config.values import ConfigError, one_of

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* +\d+\r?(\n|\Z)")
_KNOWN = "tokenizer.json, vocab.json with merges.txt, a SentencePiece .model, a .tiktoken file, or a folder with one"


def definition_file(kind: TokenizerType, location: str | os.PathLike[str]) -> Path | None:
    """Returns the file that defines a tokenizer of this type: ``location`` itself, or a file of that folder."""
    path = Path(location)
    return _definitions(path).get(kind) if path.is_dir() else path if path.is_file() else None


def settle_tokenizer_type(kind: TokenizerType | None, location: str | None) -> tuple[TokenizerType, str]:
    """Finds the type of the tokenizer that the options name.

    Args:
        kind: ``tokenizer_type``; None: guess it from the file.
        location: ``tokenizer_model``, a file or folder; None for none.

    Returns:
        The type, and a line that says what was guessed and from which file; it is empty where nothing was guessed.

    Raises:
        ConfigError: the file is of another type than ``kind``, or of no known type.
    """
    if location is None:
        return kind or TokenizerType.HF, ""
    if kind is TokenizerType.BYTE:
        raise ConfigError(
            f"tokenizer_type={kind.value} reads no file, but tokenizer_model={location!r} is given; leave one out"
        )
    path = Path(location)
    found = _definitions(path)
    if kind is None:
        if not found and path.is_file():
            raise ConfigError(f"tokenizer_model={location!r} is not a tokenizer: it can be {_KNOWN}")
        guess = next(iter(found), TokenizerType.HF)  # a missing file is for its reader to refuse
        return guess, f"tokenizer_type={guess.value}, guessed from {found[guess]}" if found else ""
    if found and kind not in found:
        [(other, file), *_] = found.items()
        raise ConfigError(
            f"tokenizer_type={kind.value}, but {file} is of a {one_of(each.value for each in found)}; leave "
            f"--tokenizer-type out, which takes {other.value}, or name another file in tokenizer_model={location!r}"
        )
    return kind, ""


def _definitions(path: Path) -> dict[TokenizerType, Path]:
    """The first file of each type: of the folder ``path``, or ``path`` itself."""
    files = [path]
    if path.is_dir():
        names = ["tokenizer.json", *(["vocab.json"] if (path / "merges.txt").is_file() else [])]
        files = [*(path / name for name in names), *sorted(path.glob("*.model")), *sorted(path.glob("*.tiktoken"))]
    found: dict[TokenizerType, Path] = {}
    for file in files:
        kind = _type_of(file) if file.is_file() else None
        if kind is not None:
            found.setdefault(kind, file)
    return found


def _type_of(file: Path) -> TokenizerType | None:
    """By the content: Llama 3's tokenizer.model is a file of tiktoken."""
    try:
        with open(file, "rb") as stream:
            head = stream.read(4096)
    except OSError:
        return None
    if head.lstrip()[:1] == b"{":
        return TokenizerType.HF
    if _RANK_LINE.match(head):
        return TokenizerType.TIKTOKEN
    return TokenizerType.SENTENCEPIECE if head[:1] == b"\n" else None  # of a protocol buffer: field 1, the pieces
