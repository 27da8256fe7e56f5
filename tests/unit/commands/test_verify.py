"""The command that verifies, lists and compares checkpoints."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus import cli
from megatron.optimus.checkpoint import save
from tests.unit.checkpoint.helpers import CONFIG, damage, owned, two_checkpoints, whole_state


@pytest.fixture
def two(tmp_path):
    return two_checkpoints(tmp_path)


_ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(capsys):
    """Runs ``optimus verify`` in this process: its exit code, and all that it printed."""

    def run(*words):
        code = cli.main(["verify", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.parametrize("tool, words", [("verify", ["--list"]), ("convert", ["x", "--to", "hf", "--help"])])
def test_a_reader_that_has_enough_is_no_error(two, tool, words):
    """As ``| head`` does."""
    command = [sys.executable, str(_ROOT / f"tools/{tool}_checkpoint.py"), str(two[0]), *words]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done.stdout.close()
    assert done.stderr.read() == "" and done.wait() == -signal.SIGPIPE


def test_a_full_checkpoint_against_a_model_only_one(two, tmp_path, tool):
    """The model-only weights are the masters cast; what one alone has is counted, and differs if it is of the model."""
    full = {key: tensor for key, tensor in whole_state(1).items() if key[1] != "weight"}
    model = {key: tensor for key, tensor in whole_state(1).items() if key[1] in ("weight", "buffer")}
    options = dict(consumed_samples=8, config=CONFIG, metadata={})
    first = save(tmp_path / "a", 1, owned(full), kind="full", **options)
    second = save(tmp_path / "b", 1, owned(model), kind="model", **options)
    for pair in ((first, second), (second, first)):
        code, out = tool(pair[0], "--compare", pair[1])
        assert code == 0 and "5 of 5 tensors that both have are bit-identical" in out
        assert f"only in {first}: 2 exp_avg, such as dense.weight exp_avg\n" in out and out.count("only in") == 1
    assert tool(two[0], "--compare", second)[0] == 0  # this one has weights beside the masters
    model["dense.weight", "weight"][3, 2] += 0.5
    third = save(tmp_path / "c", 1, owned(model), kind="model", **options)
    code, out = tool(first, "--compare", third)
    assert code == 1 and "dense.weight weight: 1 of 35 elements differ" in out and "4 of 5 tensors" in out
    del full["router.expert_bias", "buffer"]
    fourth = save(tmp_path / "d", 1, owned(full), kind="full", **options)
    code, out = tool(fourth, "--compare", second)
    assert code == 1 and f"only in {second}: 1 buffer, such as router.expert_bias buffer" in out


def test_the_script_of_a_source_tree(two, tmp_path):
    command = [sys.executable, str(_ROOT / "tools/verify_checkpoint.py"), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": good, full, step") == 2 and done.stderr == ""
    damage(two[0], ("dense.weight", "exp_avg"))
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1


def test_command_line(two, tmp_path, tool):
    code, out = tool(tmp_path)
    assert code == 0 and out.count(": good, full, step") == 2
    code, out = tool(two[1], "--list")
    assert code == 0 and "experts.weight exp_avg F32 4x3x5" in out
    code, out = tool(two[0], "--compare", two[1])
    assert code == 1
    assert "dense.weight master: 1 of 35 elements differ, by 5.000e-01 at most" in out
    assert "8 of 9 tensors that both have are bit-identical" in out
    assert tool(two[0], "--compare", two[0])[0] == 0
    damage(two[0], ("dense.weight", "exp_avg"))
    shutil.copytree(two[1], tmp_path / "step-00000003")
    code, out = tool(tmp_path)
    assert code == 1 and "dense.weight (exp_avg)" in out and out.count("DAMAGED") == 2
    assert "step-00000003/manifest.json: is of a 'full' checkpoint of step 2" in out
    (tmp_path / "empty").mkdir()
    code, out = tool(tmp_path / "empty")
    assert code == 1 and "holds no complete checkpoint" in out and "convert" not in out
    code, out = tool(tmp_path / "nothing")
    assert code == 2 and "nothing: no such file or folder" in out
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    code, out = tool(tmp_path / "hf")
    assert code == 1 and "config.json is of another format: convert it first" in out
