"""Uploads to and downloads from a server on loopback by the real huggingface_hub, through HF_ENDPOINT."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.optimus.commands.convert import main
from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.indexed import IndexedDatasetWriter
from megatron.optimus.platform import hub
from tests.unit.platform.fake_hub import FakeHub

pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
from tests.unit.convert.convert_cases import assert_same, our_config, our_run, tensors

_ROOT = Path(__file__).parents[3]
# Each is a command line of convert or pretrain, run one after the other in one process: imports take seconds.
_PROGRAM = """
import shlex, sys
from megatron.optimus.commands import convert
for line in sys.stdin:
    words = shlex.split(line)
    if words[0] == "pretrain":
        from megatron.optimus import pretrain
        print("code", pretrain.main(words[1:]), flush=True)
    else:
        print("code", convert.main(words), flush=True)
"""


_TRAINING = (
    "--seq-length 16 --params-dtype fp32 --micro-batch-size 2 --global-batch-size 2 --eval-interval 0 --split 1,0,0 "
    "--save-interval 0 --train-iters 1 --device cpu"
)


def _tokens(folder):
    """A file for one step of training; returns its prefix."""
    with IndexedDatasetWriter(str(folder / "tokens"), "uint16") as writer:
        writer.add_document(list(range(1, 49)))
    return folder / "tokens"


def commands(server, cache, lines, **variables):
    """Runs command lines of `optimus convert`; returns their exit codes, and stdout and stderr."""
    settings = {"HF_ENDPOINT": server, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"} | variables
    settings["HF_HUB_DISABLE_XET"] = "1"  # files go by plain HTTP
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input="\n".join(lines),
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("code ")]
    return codes, done.stdout, done.stderr


def test_a_model_goes_to_the_hub_and_comes_back(tmp_path):
    our_run(tmp_path / "run", our_config(moe_router_enable_expert_bias=True), "full", bias=0.5)
    run, cache = tmp_path / "run", tmp_path / "cache"
    with FakeHub() as server:
        server.models["me/open"] = {"private": False, "files": {}}
        lines = [
            f"{run} {tmp_path / 'dry'} --to hf --push me/model --dry-run",
            f"{run} {tmp_path / 'hf'} --to hf --push me/model --max-shard-size 60KB",
            f"{run} {tmp_path / 'x'} --to hf --push me/open",
            f"hf://me/model {tmp_path / 'back'} --to optimus --verify",
            f"hf://me/model@{'a' * 40} {tmp_path / 'back2'} --to optimus",
            f"hf://me/none {tmp_path / 'y'} --to optimus",
            f"pretrain --from-hf hf://me/model --run-dir {tmp_path / 'on'} {_TRAINING} --data-path {_tokens(tmp_path)}",
        ]
        codes, out, err = commands(server.url, cache, lines, HF_TOKEN="hf_secret")
        assert codes == [0, 0, 2, 0, 0, 2, 0], err
        assert "resumed from hf:/me/model: step 0, 0 samples consumed (weights only" in out and "step=1 loss=" in out
        model = server.models["me/model"]
        assert model["private"] and set(model["files"]) == {file.name for file in (tmp_path / "hf").iterdir()}
        for name, content in model["files"].items():
            assert content == (tmp_path / "hf" / name).read_bytes(), name
        assert {auth for _, path, auth in server.requests if "commit" in path} == {"Bearer hf_secret"}
    assert f"would upload to {server.url}/me/model, private: config.json, generation_config.json, conf" in out
    assert f"uploaded to {server.url}/me/model, private" in out and "hf_secret" not in out + err
    assert "--push me/open: is there already, and public; add --public" in err
    assert "hf://me/none:" in err and "Traceback" not in err and not (tmp_path / "x").exists()
    downloaded = {file.name for file in cache.rglob("snapshots/*/*")}
    assert {"config.json", "README.md", "modeling_optimus.py"} - downloaded == {"README.md", "modeling_optimus.py"}

    # the server is gone: what is in the cache is read, what is not is one line that names the cache
    lines = [f"hf://me/model {tmp_path / 'again'} --to optimus", f"hf://me/other {tmp_path / 'y'} --to optimus"]
    codes, _, err = commands(server.url, cache, lines)
    assert codes == [0, 2] and "Traceback" not in err
    assert f"hf://me/other is not in the cache {cache}/hub, and {server.url} cannot be reached" in err
    for name in ("back", "back2", "again"):
        main([str(tmp_path / name), str(tmp_path / f"{name} hf"), "--to", "hf"])
        assert_same(tensors(tmp_path / f"{name} hf"), tensors(tmp_path / "hf"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--to", "optimus", "--push", "me/x"], "--push uploads a model for transformers, and --to is optimus"),
        (["--to", "hf", "--push", "x", "--dry-run"], "--push x: name a model as OWNER/NAME"),
        (["--to", "hf", "--push", "a/b/c", "--dry-run"], "--push a/b/c: "),
        (["--to", "hf", "--push", "me/x"], "--push: nobody is logged in; run `hf auth login`"),
        (["--to", "hf", "--public"], "--public says who may see an upload"),
    ],
)
def test_uploads_that_cannot_be(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main([str(tmp_path / "run"), str(tmp_path / "hf"), *words]) == 2
    assert message in capsys.readouterr().err


def test_names_of_the_hub(tmp_path, monkeypatch):
    assert hub.local_folder(tmp_path) == tmp_path and hub.local_folder("runs/a") == Path("runs/a")
    for wrong in ("hf://me", "hf://me/x/y", "hf://"):
        with pytest.raises(ConfigError, match=r"a model of the hub is hf://OWNER/NAME"):
            hub.local_folder(wrong)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else found(name))
    with pytest.raises(ConfigError, match=r"hf://me/x needs the package huggingface_hub: pip install optimus-meg"):
        hub.local_folder(Path("hf://me/x"))
