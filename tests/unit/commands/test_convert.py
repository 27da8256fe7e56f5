"""The command that converts checkpoints: what it prints and its exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import hf_model

_ROOT = Path(__file__).parents[3]


def test_command_line(tmp_path):
    hf_model("olmoe").save_pretrained(tmp_path / "hf")

    def tool(*arguments):
        return subprocess.run(
            [sys.executable, str(_ROOT / "tools" / "convert_checkpoint.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    done = tool("hf", "ours", "--to", "optimus", "--dry-run")
    assert done.returncode == 0 and "layers.1.moe.experts.down_weight  float32  [4, 32, 24]" in done.stdout, done.stderr
    assert not (tmp_path / "ours").exists()
    done = tool("hf", "ours", "--to", "optimus")
    assert done.returncode == 0 and "wrote ours: 25 tensors" in done.stdout, done.stdout + done.stderr
    done = tool("hf", "ours", "--to", "optimus")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "add --overwrite" in done.stderr
