"""Pieces written past the page cache, by several writers into one file, and where that is refused."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from megatron.optimus.checkpoint import writer as module
from megatron.optimus.checkpoint.writer import ALIGNED, PieceWriter

BLOCK = 4 * ALIGNED
SIZE = 40 * ALIGNED + 77


def cuts() -> list[int]:
    """Bounds of pieces: neighbours in a page, in a block, over several blocks, empty ones, and of one byte."""
    draw = random.Random(5)
    bounds = {draw.randrange(SIZE) for _ in range(12)} | {ALIGNED, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 9}
    return [0, *sorted(bounds), SIZE]


def write_all(path: Path, content: bytes) -> dict[int, bytes]:
    """Three writers at once, each every third piece, in blocks of uneven sizes; hash by the piece's first byte."""
    bounds = cuts()
    hashes: dict[int, bytes] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            writer = PieceWriter(path)
            try:
                for start, stop in list(itertools.pairwise(bounds))[index::3]:
                    middle = start + (stop - start) // 3
                    for low, high in ((start, middle), (middle, stop)):
                        block = bytearray(content[low:high])
                        writer.write(memoryview(block), low)
                        block[:] = bytes(len(block))  # the caller's memory is free again
                    hashes[start] = writer.end_piece()
                writer.finish()
            finally:
                writer.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return hashes


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    return random.Random(6).randbytes(SIZE)


def spy(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[str], int | None]) -> list[tuple[int, int]]:
    """Notes (offset, length) of direct writes. ``refuse("open" or "write")``: the error that a direct one gets."""
    seen: list[tuple[int, int]] = []
    direct: set[int] = set()
    real_open, real_pwrite = os.open, os.pwrite

    def on_open(path: str, flags: int, *rest: int) -> int:
        code = refuse("open") if flags & os.O_DIRECT else None
        if code is not None:
            raise OSError(code, os.strerror(code))
        descriptor = real_open(path, flags & ~os.O_DIRECT, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def on_pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor not in direct:
            return real_pwrite(descriptor, data, offset)
        code = refuse("write")
        if code is not None:
            raise OSError(code, os.strerror(code))
        address = module.np.frombuffer(data, module.np.uint8).ctypes.data
        assert (address % ALIGNED, offset % ALIGNED, len(data) % ALIGNED) == (0, 0, 0)
        seen.append((offset, len(data)))
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "open", on_open)
    monkeypatch.setattr(os, "pwrite", on_pwrite)
    return seen


def check(path: Path, content: bytes, hashes: dict[int, bytes]) -> None:
    assert path.read_bytes() == content
    bounds = cuts()
    assert hashes == {start: xxhash.xxh3_128_digest(content[start:stop]) for start, stop in itertools.pairwise(bounds)}


def test_pieces_of_several_writers_are_in_their_places(tmp_path: Path, content: bytes) -> None:
    """As the file system of this folder has it, direct or not."""
    check(tmp_path / "file", content, write_all(tmp_path / "file", content))


def test_whole_pages_go_past_the_cache(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy(monkeypatch, lambda call: None)
    check(tmp_path / "file", content, write_all(tmp_path / "file", content))
    bounds = cuts()
    pages = sum(max(0, stop // ALIGNED - -(-start // ALIGNED)) for start, stop in itertools.pairwise(bounds))
    assert sum(length for _, length in seen) == pages * ALIGNED
    assert max(length for _, length in seen) == BLOCK


@pytest.mark.parametrize("call", ["open", "write", "second write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    count = iter(range(1000))

    def refuse(made: str) -> int | None:
        if made == "open":
            return errno.EINVAL if call == "open" else None
        return errno.EINVAL if call == "write" or next(count) >= 3 else None

    caplog.set_level("INFO", "optimus")
    spy(monkeypatch, refuse)
    check(tmp_path / "file", content, write_all(tmp_path / "file", content))
    assert sum("through the page cache" in record.message for record in caplog.records) == 3  # once a writer


@pytest.mark.parametrize("call", ["open", "write"])
def test_another_error_is_an_error(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A full disk must not be tried again another way; no descriptor stays open."""
    spy(monkeypatch, lambda made: errno.ENOSPC if made == call else None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write_all(tmp_path / "file", content)
    assert len(os.listdir("/proc/self/fd")) == before


def test_time_spent_hashing_while_nothing_is_written_is_noted(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block must be hashed before anything can be written; never more than all hashing took."""
    writer = PieceWriter(tmp_path / "file")
    writer.write(memoryview(content), 0)
    writer.finish()
    writer.close()
    assert writer.hash_wait_s > 0
