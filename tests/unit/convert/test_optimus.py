"""Checkpoints of Optimus as a source: every byte is read once and hashed on the way, and damage is named."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError, save
from megatron.optimus.checkpoint.reader import ShardFiles
from megatron.optimus.checkpoint.slices import TensorSlice
from megatron.optimus.config.schema import ModelConfig, RunConfig
from megatron.optimus.config.serialize import to_dict
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.convert.formats import matrices
from megatron.optimus.models.parameters import parameter_shapes

pytest.importorskip("transformers")
from .convert_cases import our_config, our_run


def write_model(folder, experts):
    config = ModelConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=1024,
        num_experts=experts,
        moe_ffn_hidden_size=512,
        moe_router_topk=2,
    )
    slices = []
    for index, (name, shape) in enumerate(parameter_shapes(config).items()):
        flat = torch.arange(math.prod(shape), dtype=torch.float32).mul_(1e-6).add_(index)
        slices.append(TensorSlice(name, "weight", shape, 0, len(flat), flat))
    run = to_dict(RunConfig(model=config))
    save(folder, 1, slices, kind="model", consumed_samples=0, config=run, metadata={})
    return sum(len(piece.tensor) * 4 for piece in slices)


@pytest.mark.parametrize(("to", "times"), [("hf", 1), ("universal", 1), ("zero", 1), ("megatron", 2)])
def test_every_byte_of_the_source_is_read_once(tmp_path, monkeypatch, to, times):
    """Hashed on the way; only where matrices are wanted out of order is a piece read once more, to verify it before."""
    size, read, whole = write_model(tmp_path / "model", 4), [], ShardFiles.read

    def counted(files, chunk, buffer):
        read.append(chunk.num_bytes)
        return whole(files, chunk, buffer)

    monkeypatch.setattr(ShardFiles, "read", counted)
    options = Options(tp=2) if to == "megatron" else Options(names="hf")
    convert(tmp_path / "model", tmp_path / to, to=to, options=options)
    assert size <= sum(read) <= times * size
    if times == 1:
        assert sum(read) == size
    shard = next((tmp_path / "model/model-00000001").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    for at in (len(data) - 1, len(data) // 2):  # whatever was made of it before the piece's last byte came
        data[at] ^= 1
        shard.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged: xxh3_128"):
            convert(tmp_path / "model", tmp_path / "not", to=to, options=options)
        assert not (tmp_path / "not").exists()
        source = open_source(tmp_path / "model")
        for name, start, stop in matrices(source.model):
            if start == 0:
                source.read(name, "weight", 0, stop // 2 if stop > 256 else stop)
        with pytest.raises(CheckpointError, match="damaged: xxh3_128"):
            source.finish()  # the rest is looked at although nobody wanted it
        source.close()
        data[at] ^= 1


def test_damaged_checkpoints_are_not_converted(tmp_path):
    our_run(tmp_path / "run", our_config(), "full")
    shard = tmp_path / "run" / "step-00000004" / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 5] ^= 16  # the first tensor: master weights, which an export reads
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor .* damaged: xxh3_128"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
