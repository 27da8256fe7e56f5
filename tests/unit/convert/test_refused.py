"""What every conversion refuses or undoes: destinations, failing writes, and what reads back otherwise."""

import math
import os

import pytest

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.shards import write_shard
from megatron.optimus.convert import Options, convert

pytest.importorskip("transformers")
from .convert_cases import assert_same, our_config, our_run, tensors


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
