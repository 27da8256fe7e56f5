"""Memory that outlives ranks: a file is complete or not, and folders that nobody uses are removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.optimus.platform import memory_slots
from megatron.optimus.platform.memory_slots import DATA_START, AnonymousSlots, Generation, MemorySlot, newest_step


def written(slot: MemorySlot, step: int, data: bytes) -> None:
    slot.clear()
    memory = slot.map(len(data))
    memory[DATA_START : DATA_START + len(data)] = data
    slot.commit(step, len(data), {"of": step})


def test_a_generation_is_there_once_it_is_complete(tmp_path: Path) -> None:
    slot = MemorySlot(tmp_path / "rank-0.0")
    assert slot.read() is None
    written(slot, 7, b"a" * 5000)
    assert slot.read() == Generation(7, 5000, {"of": 7})
    again = MemorySlot(tmp_path / "rank-0.0")  # another process
    assert again.read() == Generation(7, 5000, {"of": 7})
    assert again.map(5000)[DATA_START : DATA_START + 5000] == b"a" * 5000
    free, used = again.free_bytes()
    assert free > 0 and used >= DATA_START + 5000
    slot.clear()
    assert again.read() is None, "it is being written"
    written(slot, 8, b"b" * 20_000)  # a longer one
    assert again.read() == Generation(8, 20_000, {"of": 8})
    descriptor = os.open(slot.path, os.O_RDWR)
    os.pwrite(descriptor, b"x", DATA_START + 20_001)  # in its index
    os.close(descriptor)
    assert again.read() is None
    again.close()
    slot.free()
    assert not list(tmp_path.iterdir())


def test_an_index_that_has_no_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes what it has room for and says how much that was; the next call fails."""
    slot, pwrite, room = MemorySlot(tmp_path / "rank-0.0"), os.pwrite, [10]

    def nearly_full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset == 0:  # the file has this page
            return pwrite(descriptor, data, offset)
        if not room:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[: room.pop()], offset)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", nearly_full)
        slot.commit(3, 0, {"of": "many pieces"})
    assert slot.read() is None


def test_the_newest_step_is_one_that_all_ranks_have(tmp_path: Path) -> None:
    assert newest_step(None) == newest_step(tmp_path) == -1
    for name, step in (("rank-0.0", 3), ("rank-0.1", 4), ("rank-1.0", 3), ("rank-1.1", 2), ("copy-5.0", 9)):
        written(MemorySlot(tmp_path / name), step, b"data")
    assert newest_step(tmp_path) == 3
    MemorySlot(tmp_path / "rank-1.0").clear()
    assert newest_step(tmp_path) == -1


def test_the_launcher_holds_memory_for_its_ranks(tmp_path: Path) -> None:
    slots = AnonymousSlots(tmp_path / "memory", 2)
    assert sorted(path.name for path in slots.folder.iterdir()) == ["rank-0.0", "rank-0.1", "rank-1.0", "rank-1.1"]
    own = MemorySlot(slots.folder / "rank-1.0")
    written(own, 5, b"data")
    assert MemorySlot(slots.folder / "rank-1.0").read() == Generation(5, 4, {"of": 5})
    own.free()  # the launcher's stays, and is empty
    assert (slots.folder / "rank-1.0").is_symlink() and MemorySlot(slots.folder / "rank-1.0").read() is None
    slots.close()


def test_abandoned_folders_are_removed_and_used_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_slots, "_SHARED_MEMORY", str(tmp_path))
    folders = {name: Path(memory_slots.shared_folder(name)) for name in ("a1", "b2", "c3", "d4", "not-ours")}
    for name in ("a1", "b2", "c3", "not-ours"):
        folders[name].mkdir()
        (folders[name] / "used").touch()
    long_ago = time.time() - 2 * memory_slots._ABANDONED_SECONDS
    for name in ("a1", "b2", "not-ours"):
        for path in (folders[name] / "used", folders[name]):
            os.utime(path, (long_ago, long_ago))
    in_use = memory_slots.use_folder(folders["b2"])
    assert not folders["a1"].exists()
    for path in (folders["b2"] / "used", folders["b2"]):
        os.utime(path, (long_ago, long_ago))
    own = memory_slots.use_folder(folders["d4"])
    # One is in use, one was written to of late, and one has a name that no launch gives.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"optimus-memory-{name}" for name in ("b2", "c3", "d4", "not-ours")
    ]
    for descriptor in (in_use, own):
        os.close(descriptor)
