"""Safetensors files: ours are anybody's, and what a file says of itself is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.shards import (
    ShardFile,
    WriteItem,
    dtype_name,
    shard_header,
    tensor_bytes,
    torch_dtype,
    write_shard,
)


def item(key: str, tensor: torch.Tensor) -> WriteItem:
    return WriteItem(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path: Path) -> None:
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "half": torch.randn(5).bfloat16(), "wide": torch.randn(2, 3)}
    path = tmp_path / "x.safetensors"
    hashes = write_shard(path, [item(key, tensor) for key, tensor in tensors.items()], {"format": "pt"})
    assert hashes == {key: xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)) for key, tensor in tensors.items()}
    found = load_file(path)
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    file = ShardFile(path, path.stat().st_size, 1 << 16)
    for key, tensor in tensors.items():
        entry = file.tensors[key]
        assert (torch_dtype(entry.dtype), entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert entry.offset % tensor.itemsize == 0
        data = bytearray(entry.num_bytes)
        file.read_into(memoryview(data), entry.offset)
        assert data == bytes(tensor_bytes(tensor))
    with pytest.raises(CheckpointError, match="ends at byte"):
        file.read_into(memoryview(bytearray(8)), path.stat().st_size - 4)
    file.close()
    with pytest.raises(FileExistsError):
        write_shard(path, [])


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    one = item("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="two tensors have the key 'a'"):
        write_shard(tmp_path / "x", [one, one])
    lying = WriteItem("a", torch.float32, (3,), lambda: torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"a: announced torch.float32 \(3,\), got torch.float32 \(2,\)"):
        write_shard(tmp_path / "y", [lying])
    with pytest.raises(CheckpointError, match=r"torch.complex64 cannot be stored; supported: .*torch.float32"):
        dtype_name(torch.complex64)
    with pytest.raises(CheckpointError, match="dtype 'F8' is not supported"):
        torch_dtype("F8")


@pytest.mark.parametrize("num_bytes, max_header, message", [(-1, 1 << 16, "the manifest says"), (0, 8, "it claims")])
def test_size_and_header_are_checked(tmp_path: Path, num_bytes: int, max_header: int, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(shard_header([("a", "F32", (2,))]) + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        ShardFile(path, path.stat().st_size + num_bytes, max_header)
