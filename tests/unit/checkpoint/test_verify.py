"""The verifier and its command line."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.optimus import cli
from megatron.optimus.checkpoint import CheckpointError, load_manifest, save
from megatron.optimus.checkpoint.verify import compare, find_damage, verify
from tests.unit.checkpoint.helpers import CONFIG, layout_slices, owned, whole_state

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(capsys):
    """Runs ``optimus verify`` in this process: its exit code, and all that it printed."""

    def run(*words):
        code = cli.main(["verify", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture
def two(tmp_path):
    """Steps 1 and 2 with the same content, written at different layouts, but for one element."""
    state = whole_state(1)
    options = dict(kind="full", consumed_samples=8, config=CONFIG, metadata={})
    first = save(tmp_path, 1, owned(state), **options)
    state["dense.weight", "master"][3, 2] += 0.5
    every = [s for rank in range(4) for s in layout_slices(state, rank, 4, 2, interleaved=True, loading=False)]
    return first, save(tmp_path, 2, every, **options)


def damage(path, *names):
    data = bytearray((path / "node-00000-0.safetensors").read_bytes())
    for name in names:
        state = whole_state(1)[name]
        position = data.find(bytes(state.flatten().view(torch.uint8).numpy()))
        assert position > 0
        data[position + 1] ^= 8
    (path / "node-00000-0.safetensors").write_bytes(data)


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_bad_tensor_is_listed(two, jobs):
    assert verify(two[0], jobs=jobs).step == 1
    damage(two[0], ("dense.weight", "exp_avg"), ("seen", "buffer"))
    lines = find_damage(two[0], load_manifest(two[0]), jobs=jobs)
    assert len(lines) == 2 and "dense.weight (exp_avg)" in lines[0] and "seen (buffer)" in lines[1]
    with pytest.raises(CheckpointError, match="exp_avg"):
        verify(two[0])


@pytest.mark.parametrize("tool, words", [("verify", ["--list"]), ("convert", ["x", "--to", "hf", "--help"])])
def test_a_reader_that_has_enough_is_no_error(two, tool, words):
    """As ``| head`` does."""
    command = [sys.executable, str(_ROOT / f"tools/{tool}_checkpoint.py"), str(two[0]), *words]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done.stdout.close()
    assert done.stderr.read() == "" and done.wait() == -signal.SIGPIPE


def test_compare(two, tmp_path):
    differences = {(d.name, d.kind): d for d in compare(*two, jobs=2)}
    assert differences.keys() == whole_state(1).keys()
    [(key, changed)] = [(key, d) for key, d in differences.items() if not d.is_same]
    assert key == ("dense.weight", "master")
    assert (changed.num_different, changed.numel) == (1, 35) and changed.max_abs == pytest.approx(0.5)
    fewer = [piece for piece in owned(whole_state(1)) if piece.name != "flag"]
    other = save(tmp_path / "other", 1, fewer, kind="full", consumed_samples=0, config=CONFIG, metadata={})
    [missing] = [d for d in compare(two[0], other) if d.reason]
    assert missing.name == "flag" and str(other) in missing.reason and missing.only_in == two[0]


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
