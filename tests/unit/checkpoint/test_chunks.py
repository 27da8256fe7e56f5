"""Chunks that are read where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import DamagedError, Manifest, Saver, TensorSlice, load, load_manifest
from megatron.optimus.checkpoint import chunks as module


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

    def noted(self: module.ShardFiles, chunk: module.Chunk, buffer: torch.Tensor) -> torch.Tensor:
        targets.append(buffer.data_ptr())
        return read(self, chunk, buffer)

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
