"""What a conversion refuses or undoes: destinations, damage, failing writes, wrong folders; its command line."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.shards import write_shard
from megatron.optimus.config.family import Family
from megatron.optimus.config.schema import ConfigError, ModelConfig
from megatron.optimus.convert import Options, convert, open_source
from megatron.optimus.convert.megatron_map import megatron_tensors
from tests.helpers import start_program

pytest.importorskip("transformers")
from .convert_cases import assert_same, hf_model, our_config, our_run, tensors


def test_destination_rules(tmp_path):
    our_run(tmp_path / "run", our_config(), "full")
    done = convert(tmp_path / "run", tmp_path / "hf", to="hf", dry_run=True)
    assert not (tmp_path / "hf").exists() and len(done.tensors) == 2 * (6 + 2 + 1 + 12) + 3
    assert done.num_bytes == sum(math.prod(t.shape) * t.dtype.itemsize for t in done.tensors)
    (tmp_path / "hf").mkdir()
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "stale").touch()
    with pytest.raises(CheckpointError, match="not empty; choose another destination or add --overwrite"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    convert(tmp_path / "run", tmp_path / "hf", to="hf", overwrite=True)
    assert not (tmp_path / "hf" / "stale").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is no converted model"):
        convert(tmp_path / "run", tmp_path / "home", to="hf", overwrite=True)
    for destination in (tmp_path, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="holds the source"):
            convert(tmp_path / "run", destination, to="hf", overwrite=True)
    with pytest.raises(CheckpointError, match="already is in 'optimus' format"):
        convert(tmp_path / "run", tmp_path / "x", to="optimus")
    assert sorted(os.listdir(tmp_path)) == ["hf", "home", "run"]


def test_a_failing_write_leaves_the_destination(tmp_path, monkeypatch):
    from megatron.optimus.convert import hf

    our_run(tmp_path / "run", our_config(), "full")
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    before = tensors(tmp_path / "hf")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write_shard", full)
    with pytest.raises(CheckpointError, match=r"writing .*hf: No space left on device"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf", options=Options("fp32"), overwrite=True)
    assert_same(before, tensors(tmp_path / "hf"))
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_damaged_checkpoints_are_not_converted(tmp_path):
    our_run(tmp_path / "run", our_config(), "full")
    shard = tmp_path / "run" / "step-00000004" / "node-00000-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 5] ^= 16  # the first tensor: master weights, which an export reads
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor .* damaged: xxh3_128"):
        convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("to", ["hf", "optimus"])
def test_verify_finds_what_was_written_wrong(tmp_path, monkeypatch, to):
    """One bit changes between writing and reading back; without --verify nobody would know."""
    from megatron.optimus.convert import hf, optimus

    def wrong(path, items, *rest):
        result = write_shard(path, items, *rest)
        data = bytearray(path.read_bytes())
        data[-3] ^= 8
        path.write_bytes(data)
        return result

    our_run(tmp_path / "source", our_config(), "model")
    if to == "optimus":
        convert(tmp_path / "source", tmp_path / "hf", to="hf")
    monkeypatch.setattr(hf if to == "hf" else optimus, "write_shard", wrong)
    with pytest.raises(CheckpointError, match="read back differ from the source" if to == "hf" else "damaged"):
        convert(tmp_path / ("source" if to == "hf" else "hf"), tmp_path / "out", to=to, verify=True)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / ("source" if to == "hf" else "hf"), tmp_path / "out", to=to)


def test_wrong_hf_folders(tmp_path):
    hf_model("olmoe").save_pretrained(tmp_path / "hf")
    content = tensors(tmp_path / "hf")
    good = (tmp_path / "hf" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())

    def refused(message, *, weights=None, config=config, index=None, error=CheckpointError):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if isinstance(weights, bytes):
            (folder / "model.safetensors").write_bytes(weights)
        elif weights is not None:
            save_file(weights, folder / "model.safetensors")
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(error, match=message):
            convert(folder, tmp_path / "out", to="optimus")
        assert not (tmp_path / "out").exists()

    refused("has neither model.safetensors nor .*pickle files")
    refused("header is damaged", weights=good[:-3])
    refused("lacks 1 tensors .*: lm_head.weight", weights={k: v for k, v in content.items() if k != "lm_head.weight"})
    refused("has unexpected 1 tensors .*: extra", weights=content | {"extra": torch.zeros(1)})
    refused("has shape .*, its configuration says", weights=content, config=config | {"vocab_size": 7})
    mixed = dict(content)
    mixed["model.layers.0.mlp.experts.1.up_proj.weight"] = mixed["model.layers.0.mlp.experts.1.up_proj.weight"].half()
    refused("parts of layers.0.moe.experts.gate_up_weight have different dtypes", weights=mixed)
    refused("model_type='gpt2'", weights=content, config=config | {"model_type": "gpt2"}, error=ConfigError)
    for name in ("../hf/model.safetensors", "/etc/passwd", 5):
        refused("is not the plain name", weights=content, index={"weight_map": {"a": name}})
    for value in (["model.safetensors"], [], {}, 3, None):
        refused("is not the plain name", weights=content, index={"weight_map": {"a": value}})
    refused("weight_map is missing", weights=content, index={})
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tmp_path / "nothing", tmp_path / "out", to="hf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_hugging_face_folder_is_an_error_and_no_wait(tmp_path, name):
    hf_model("olmo").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "hf" / name)
    with pytest.raises(CheckpointError, match=r"not a regular file|has no|holds no"):
        open_source(tmp_path / "hf")


def test_command_line(tmp_path):
    hf_model("olmoe").save_pretrained(tmp_path / "hf")

    def tool(*options):
        words = ["convert", str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "optimus", *options]
        return start_program("megatron.optimus.cli", words, 1, timeout=60)

    done = tool("--dry-run")
    assert done.returncode == 0 and "layers.1.moe.experts.down_weight  float32  [4, 32, 24]" in done.stdout, done.stderr
    assert not (tmp_path / "ours").exists()
    done = tool()
    assert done.returncode == 0 and f"wrote {tmp_path / 'ours'}: 25 tensors" in done.stdout, done.stdout + done.stderr
    done = tool()
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "add --overwrite" in done.stderr


def test_megatrons_files_hold_no_other_attention(monkeypatch):
    class Other(Family):
        attention = "somewhere:Else"

    monkeypatch.setattr("megatron.optimus.config.family._load", lambda name: Other())
    with pytest.raises(CheckpointError, match="model_family=decoder: Megatron's files hold model_family=decoder only"):
        megatron_tensors(ModelConfig(), {(0, 0, 0): None})
