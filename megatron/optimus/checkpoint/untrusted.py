"""Reading small files that may be damaged or made to do harm: only regular files, of bounded size, as strict JSON."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from megatron.optimus.checkpoint.errors import CheckpointError
from megatron.optimus.platform.files import open_regular


def read_small_file(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most ``limit`` bytes. Raises CheckpointError for anything else, links included."""
    check_regular(path)
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:  # which may be another than the one checked
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path}: {size} bytes, limit {limit}")
            return file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def check_regular(path: Path, size: int | None = None) -> None:
    """Raises CheckpointError unless ``path`` is a file and no link, of ``size`` bytes if that is given."""
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path}: not a regular file (links are not followed inside a checkpoint); put a copy there, or let "
            "huggingface_hub download it with local_dir"
        )
    if size is not None and status.st_size != size:
        raise CheckpointError(f"{path}: has {status.st_size} bytes, the manifest says {size}")


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object without duplicate keys, NaN or infinities.

    Args:
        data: UTF-8 text.
        source: where it comes from; opens the error's message.

    Raises:
        CheckpointError: the text is anything else.
    """
    try:
        body = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {str(error)[:300]}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{source}: must be a JSON object, is {type(body).__name__}")
    return body


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a double")
    return value
