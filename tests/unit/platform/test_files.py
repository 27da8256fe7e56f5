"""Durable writes: whole or not at all."""

import errno
import os
import stat

import pytest

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform import files


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_whole(tmp_path, sync):
    path = tmp_path / "file.json"
    files.write_atomically(path, "ü", sync=sync)
    assert path.read_bytes() == "ü".encode()
    files.write_atomically(path, b"second", sync=sync)
    assert path.read_bytes() == b"second" and os.listdir(tmp_path) == ["file.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode), "the user's permissions"


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "rename"])
def test_a_failing_write_leaves_the_file_as_it_was(tmp_path, monkeypatch, failing):
    path = tmp_path / "file.json"
    files.write_atomically(path, b"first")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"second")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file.json"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:3], offset))
    files.write_new(tmp_path / "new", b"0123456789")
    assert (tmp_path / "new").read_bytes() == b"0123456789"
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "new", b"")


def test_a_tree_is_deleted_without_following_links(tmp_path):
    files.make_directory(tmp_path / "a" / "b")
    files.make_directory(tmp_path / "a" / "b")
    (tmp_path / "kept").mkdir()
    (tmp_path / "a" / "b" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "a" / "file").touch()
    files.delete_tree(tmp_path / "a")
    assert os.listdir(tmp_path) == ["kept"]


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
        for name in ("link", "dangling", "pipe"):
            with pytest.raises(OSError, match=f"not a regular file .links are not followed.; move it away: .*{name}"):
                files.open_regular(tmp_path / name, flags)
        with pytest.raises(OSError):
            files.open_regular(tmp_path / "folder", flags)
        os.close(files.open_regular(tmp_path / "target", flags))
    assert (tmp_path / "target").read_text() == "kept" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("No space left on device")]
)
def test_a_write_error_names_file_reason_and_remedy(error: OSError) -> None:
    with (
        pytest.raises(ConfigError, match=r"^out cannot be written: No space left on device; name another$"),
        files.naming_write_errors("out", "name another"),
    ):
        raise error
