"""Chunks: where they are read to, past the page cache or not, and how many files stay open."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import DamagedError, Manifest, Saver, TensorSlice, load, load_manifest
from megatron.optimus.checkpoint import reader as module
from megatron.optimus.checkpoint.verify import find_damage


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two tensors, of seven chunks each."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    whole = {name: torch.randn(7 * 16 - 3) for name in ("a", "b")}
    slices = [TensorSlice(name, "master", (109,), 0, 109, tensor) for name, tensor in whole.items()]
    saver = Saver(tmp_path / "root", asynchronous=False)
    return saver.start(slices, Manifest("full", 1, 1, {}, {}, {}, {}), retain=1)[0].path, whole


def test_bytes_are_read_into_the_tensor_that_wants_them(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same dtype, on the host, in one stretch: no buffer. Otherwise through one. The values are right either way."""
    path, whole = saved
    targets: list[int] = []
    read = module.ShardFiles.read

    def noted(
        self: module.ShardFiles, chunk: module.ReadChunk, buffer: torch.Tensor, *, is_paged: bool = False
    ) -> torch.Tensor:
        targets.append(buffer.data_ptr())
        return read(self, chunk, buffer, is_paged=is_paged)

    monkeypatch.setattr(module.ShardFiles, "read", noted)
    direct, cast = torch.empty(109), torch.empty(109, dtype=torch.bfloat16)
    requests = [TensorSlice("a", "master", (109,), 0, 109, direct), TensorSlice("b", "master", (109,), 0, 109, cast)]
    load(path, requests, cast=True)
    assert torch.equal(direct, whole["a"]) and torch.equal(cast, whole["b"].bfloat16())
    begin = direct.data_ptr()
    inside = [address for address in targets if begin <= address < begin + direct.nbytes]
    assert sorted(inside) == [begin + 64 * number for number in range(7)]
    assert len(targets) == 14

    targets.clear()  # two requests for the same elements, and one for a part of a chunk
    copies = [torch.empty(109), torch.empty(109), torch.empty(20)]
    ranges = [(0, 109), (0, 109), (30, 50)]
    load(path, [TensorSlice("a", "master", (109,), a, b, t) for (a, b), t in zip(ranges, copies, strict=True)])
    for (start, stop), tensor in zip(ranges, copies, strict=True):
        assert torch.equal(tensor, whole["a"][start:stop])
    assert len(targets) == 7


def test_damage_in_a_chunk_that_is_read_in_place_is_named(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(data)
    request = TensorSlice("b", "master", (109,), 0, 109, torch.empty(109))
    with pytest.raises(DamagedError, match=r"tensor b \(master\)"):
        load(path, [request], manifest=load_manifest(path))


@pytest.mark.parametrize("refused", [None, errno.EINVAL, errno.EFAULT])
def test_large_reads_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """At every offset in a page, to the end of the file; in whole pages; and another way where that is refused."""
    monkeypatch.setattr(module, "CHUNK_BYTES", (1 << 20) + 24)
    numel = 5 * (1 << 18) + 7
    whole = torch.randn(numel)
    saver = Saver(tmp_path / "root", asynchronous=False)
    slices = [TensorSlice("a", "master", (numel,), 0, numel, whole)]
    path = saver.start(slices, Manifest("full", 1, 1, {}, {}, {}, {}), retain=1)[0].path
    direct: set[int] = set()
    seen: list[tuple[int, int]] = []
    real_open, real_preadv = os.open, os.preadv

    def on_open(name: str, flags: int, *rest: int) -> int:
        descriptor = real_open(name, flags & ~os.O_DIRECT, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def on_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
            assert (address % 4096, offset % 4096, len(buffers[0]) % 4096) == (0, 0, 0)
            seen.append((offset, len(buffers[0])))
            if refused is not None:
                raise OSError(refused, os.strerror(refused))
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", on_open)
    monkeypatch.setattr(os, "preadv", on_preadv)
    target = torch.empty(numel, dtype=torch.float64)  # a cast goes through a buffer
    load(path, [TensorSlice("a", "master", (numel,), 0, numel, target)], cast=True)
    assert torch.equal(target, whole.double())
    if refused is None:
        assert len(seen) == 4  # of five chunks; the last is small
        assert sum(length for _, length in seen) < 4 * ((1 << 20) + 24 + 2 * 4096)
    else:
        assert 1 <= len(seen) <= 4
    shard = path / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert [line.split(" elements")[0] for line in find_damage(path, load_manifest(path))] == ["tensor a (master)"]
    with pytest.raises(DamagedError, match=r"tensor a \(master\) .* damaged"):
        load(path, [TensorSlice("a", "master", (numel,), 0, numel, target)], cast=True)


def test_of_many_files_only_some_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a thousand nodes has more files than a process may have descriptors."""
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    count = 7
    whole = torch.randn(count, 50)
    saver = Saver(tmp_path / "root", asynchronous=False)
    for step in range(count):  # every one a file; put together as one checkpoint below
        slices = [TensorSlice("a", "master", (count, 50), 0, 50 * count, whole.flatten())]
        saver.start(slices, Manifest("full", step + 1, 1, {}, {}, {}, {}), retain=None)
    manifest = load_manifest(tmp_path / "root" / "step-00000001")
    entry = manifest.tensors["a", "master"]
    [piece] = entry.pieces
    pieces = []
    for step in range(count):
        name = f"file-{step}.safetensors"
        os.rename(tmp_path / "root" / f"step-{step + 1:08d}" / piece.file, tmp_path / name)
        pieces.append(replace(piece, file=name))
    manifest.files.clear()
    manifest.files.update({one.file: (tmp_path / one.file).stat().st_size for one in pieces})
    files = module.ShardFiles(tmp_path, manifest)
    buffer = torch.empty(entry.numel * 4, dtype=torch.uint8)
    before = len(os.listdir("/proc/self/fd"))
    for one in (*pieces, *pieces[::-1]):
        data = files.read(next(module.chunks_of(one)), buffer)
        assert torch.equal(data.view(torch.float32), whole.flatten())
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * 2
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
