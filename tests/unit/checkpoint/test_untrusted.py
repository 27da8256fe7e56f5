"""Small files of unknown origin: regular, bounded, strict JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.untrusted import check_regular, parse_json, read_small_file


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_small_file(path, 4) == b"1234"
    with pytest.raises(CheckpointError, match="4 bytes, limit 3"):
        read_small_file(path, 3)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("link", "links are not followed"), ("pipe", "not a regular file"), ("none", "No such file")):
        with pytest.raises(CheckpointError, match=message):
            read_small_file(tmp_path / name, 4)
    check_regular(path, 4)
    with pytest.raises(CheckpointError, match="has 4 bytes, the manifest says 5"):
        check_regular(path, 5)


def test_json_is_an_object_without_surprises() -> None:
    assert parse_json(b'{"a": [1, 2.5, null]}', "x") == {"a": [1, 2.5, None]}
    for text, message in (
        (b"[]", "must be a JSON object, is list"),
        (b'{"a": 1, "a": 1}', "same key twice"),
        (b'{"a": Infinity}', "not a JSON number"),
        (b'{"a": 1e999}', "too large for a double"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ):
        with pytest.raises(CheckpointError, match=message):
            parse_json(text, "x")
