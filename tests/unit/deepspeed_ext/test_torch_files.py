"""Files of torch.save are read without running code, and a small file cannot become a large allocation."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.torch_files import read_torch


class Bomb:
    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.fuse),)


def test_no_file_runs_code(tmp_path: Path) -> None:
    fuse = tmp_path / "fuse"
    torch.save({"param": torch.zeros(3), "other": Bomb(fuse)}, tmp_path / "bomb.pt")
    with pytest.raises(ValueError, match=r"bomb\.pt is refused: it names posix\.mkdir"):
        read_torch(tmp_path / "bomb.pt")
    assert not fuse.exists()
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert fuse.exists(), "the bomb must work for this test to mean anything"


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    torch.save({"param": torch.arange(100.0)}, tmp_path / "good.pt")
    assert torch.equal(read_torch(tmp_path / "good.pt")["param"], torch.arange(100.0))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"cut\.pt cannot be read"):
        read_torch(tmp_path / "cut.pt")
    with pytest.raises(ValueError, match=r"none\.pt does not exist"):
        read_torch(tmp_path / "none.pt")


def repacked(source: Path, target: Path, data_pkl: bytes, compression: int) -> None:
    """The archive ``source`` with another ``data.pkl``, written as ``compression`` says."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, data_pkl if name.endswith("data.pkl") else old.read(name))


@pytest.mark.parametrize("disguised", [False, True], ids=["compressed", "said to be stored"])
def test_a_small_file_cannot_become_a_large_allocation(tmp_path: Path, disguised: bool) -> None:
    """A bomb: structure of 300 MB in an archive of 300 KB. Its reading may not cost a tenth of that."""
    torch.save({"param": torch.zeros(3)}, tmp_path / "good.pt")
    bomb = tmp_path / "bomb.pt"
    repacked(tmp_path / "good.pt", bomb, b"\0" * 300_000_000, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1_000_000
    if disguised:  # the compression method in the directory of the archive, which is what zipfile believes
        raw = bytearray(bomb.read_bytes())
        entry = -1
        while (entry := raw.find(b"PK\x01\x02", entry + 1)) >= 0:
            raw[entry + 10 : entry + 12] = b"\0\0"
        bomb.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"bomb\.pt cannot be read: .*data\.pkl is compressed \(300000000 bytes\)"):
        read_torch(bomb)
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()


def test_structure_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ext.torch_files._MAX_PICKLE_BYTES", 1000)
    torch.save({"param": torch.zeros(3)}, tmp_path / "good.pt")
    read_torch(tmp_path / "good.pt")
    torch.save({"names": ["x" * 2000]}, tmp_path / "huge.pt")
    with pytest.raises(ValueError, match=r"huge\.pt cannot be read: .*data\.pkl has \d+ bytes .* limit is 1000"):
        read_torch(tmp_path / "huge.pt")


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    torch.save({"param": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"old\.pt cannot be read: BadZipFile"):
        read_torch(tmp_path / "old.pt")
