"""The command that converts checkpoints: what it prints and its exit codes."""

import pytest

from tests.helpers import start_program

pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import hf_model


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
