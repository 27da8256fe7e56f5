"""Reads prompts: of the command line, or of a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.optimus.data.errors import DataError

FIELD = "prompt"


def read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """Returns the texts, then those of the file.

    Args:
        texts: prompts of the command line.
        file: JSON lines, each an object with a string "prompt"; empty lines are left out. None: no file.

    Raises:
        DataError: a text is not valid UTF-8, or the file cannot be read, has no prompts, or has a malformed line.
    """
    for number, text in enumerate(texts, 1):
        if not _is_utf8(text):
            raise DataError(f"--prompt {number} is not valid UTF-8: {text[:40]!a}; convert it to UTF-8")
    prompts = list(texts)
    if file is not None:
        found = list(_read_lines(file))
        if not found:
            raise DataError(f'{file}: has no prompts; write one JSON object a line, such as {{"{FIELD}": "Once"}}')
        prompts += found
    return prompts


def _read_lines(file: Path) -> Iterator[str]:
    try:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _prompt_of(line, f"{file}, line {number}")
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error


def _prompt_of(line: bytes, where: str) -> str:
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    prompt = record.get(FIELD) if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{where}: needs an object with a string "{FIELD}"')
    if not _is_utf8(prompt):
        raise DataError(f"{where}: its prompt has half of a surrogate pair, which is no text")
    return prompt


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
