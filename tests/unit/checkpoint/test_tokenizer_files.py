"""What may be copied out of a run: files inside it, and files whose content it has recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.tokenizer_files import CopyGuard, hash_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "tokenizer.json").write_text("inside")
    (tmp_path / "secret.json").write_text("secret")
    return folder


def test_only_what_is_inside_or_recorded_is_read(tmp_path: Path, folder: Path) -> None:
    secret = tmp_path / "secret.json"
    guard = CopyGuard(folder)
    assert guard.read(folder / "inner" / "tokenizer.json") == b"inside"
    for path in (secret, folder / ".." / "secret.json", folder / "inner" / ".." / ".." / "secret.json"):
        with pytest.raises(CheckpointError, match=r"outside of .*name the tokenizer with --tokenizer"):
            guard.read(path)
    known = CopyGuard.of_checkpoint(folder, [*hash_files(secret).values(), None, 3])
    assert known.read(secret) == b"secret"
    secret.write_text("another secret")
    with pytest.raises(CheckpointError, match="not the file that the checkpoint recorded"):
        known.read(secret)


def test_no_link_is_followed(tmp_path: Path, folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    (folder / "way").symlink_to(tmp_path)
    os.mkfifo(folder / "vocab.json")
    recorded = hash_files(tmp_path / "secret.json")
    guard = CopyGuard(folder, frozenset(recorded.values()))
    (tmp_path / "link.json").symlink_to(tmp_path / "secret.json")
    for path in (folder / "tokenizer.json", folder / "way" / "secret.json", tmp_path / "link.json"):
        with pytest.raises(CheckpointError, match="link"):
            guard.read(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        guard.read(folder / "vocab.json")
    assert hash_files(folder) == {}


def test_files_are_hashed_by_name(tmp_path: Path, folder: Path) -> None:
    assert list(hash_files(folder / "inner")) == ["tokenizer.json"]
    (folder / "inner" / "spiece.model").write_text("pieces")
    found = hash_files(folder / "inner" / "spiece.model")
    assert list(found) == ["tokenizer.json", "spiece.model"] and len(set(found.values())) == 2
    assert hash_files(None) == hash_files(tmp_path / "nowhere") == {}
