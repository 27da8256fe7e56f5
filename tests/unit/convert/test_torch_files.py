"""Files of torch.save: what importing DeepSpeed prints, and files that are written in one go from a scratch file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus.checkpoint import CheckpointError
from megatron.optimus.checkpoint.shards import WriteItem
from megatron.optimus.convert import Options, convert
from megatron.optimus.convert.torch_files import ScratchFile, check_bytes, read_torch, write_torch

_PROGRAM = """
import sys
from megatron.optimus.commands.convert import main
ours, hf, zero = sys.argv[1:]
assert main([ours, hf, "--to", "hf"]) == 0
assert "deepspeed" not in sys.modules
assert main([zero, hf, "--to", "hf", "--dry-run", "--overwrite"]) == 0
assert "deepspeed" in sys.modules
"""


def test_what_deepspeed_says_when_it_is_imported_is_not_among_the_results(ours, tmp_path):
    """And it is imported only for the formats that need it."""
    convert(ours, tmp_path / "zero", to="zero", options=Options(names="hf-native-moe"))
    words = [sys.executable, "-c", _PROGRAM, ours, tmp_path / "hf", tmp_path / "zero"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("wrote ") and lines[-1].startswith("would write ") and len(lines) > 20
    assert all(line.split()[1] in ("bfloat16", "float32") for line in lines[1:-1]), lines


def test_what_is_written_is_read_and_a_changed_byte_is_told(tmp_path):
    path = tmp_path / "states.pt"
    write_torch(path, {"weight": torch.arange(5.0), "step": 3})
    found = read_torch(path)
    check_bytes(path)
    assert found["step"] == 3 and found["weight"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(FileExistsError):
        write_torch(path, {})
    data = path.read_bytes()
    changed = data.replace(torch.arange(5.0).numpy().tobytes(), torch.arange(1.0, 6.0).numpy().tobytes())
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"states\.pt"):
        check_bytes(path)


def test_a_scratch_file_gives_every_tensor_as_it_came(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.randn(4, 5),
        "c": torch.tensor([7], dtype=torch.int64),
    }
    scratch = ScratchFile(tmp_path)
    items = [
        WriteItem(key, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for key, tensor in tensors.items()
    ]
    found = scratch.collect(items)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)
        assert found[key].untyped_storage().nbytes() == tensor.numel() * tensor.itemsize  # torch.save writes storages
    scratch.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"b: announced torch\.float32"):
        scratch.collect([WriteItem("b", torch.float32, (2, 2), lambda: torch.zeros(2, 2, dtype=torch.float16))])
