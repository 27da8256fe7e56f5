"""The OLMoE-mix-0924 recipe on a small stand-in: listing, download list, verification, tokens, blend."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.sources import read_sources
from megatron.optimus.data.tokenize.tokenizer import train_bpe

from .programs import ROOT

RECIPE = ROOT / "examples" / "data" / "olmoe_mix_0924"
SPEC = importlib.util.spec_from_file_location("olmoe_recipe", RECIPE / "recipe.py")
assert SPEC is not None and SPEC.loader is not None
module = importlib.util.module_from_spec(SPEC)
sys.modules["olmoe_recipe"] = module  # its functions run in worker processes too
SPEC.loader.exec_module(module)
MANIFEST = module.load_manifest()
CORPORA = {corpus: len(content["files"]) for corpus, content in MANIFEST["corpora"].items()}


def recipe(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, str(RECIPE / "recipe.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    """As the hub gives it."""
    entries = [{"path": f"data/{name}", "size": 10, "type": "file"} for name in module.paths(MANIFEST)]
    path = tmp_path / "listing.json"
    path.write_text(json.dumps([*entries, {"path": "README.md", "size": 7}, {"path": "data/dclm", "size": 0}]))
    return path


def test_names_of_the_manifest() -> None:
    assert CORPORA == {
        "algebraic-stack": 16,
        "dclm": 1970,
        "open-web-math": 26,
        "pes2o": 26,
        "starcoder": 863,
        "wiki": 2,
    }
    names = module.paths(MANIFEST)
    assert len(names) == len(set(names)) == 2903
    assert {"dclm/dclm-1969.json.zst", "open-web-math/041.jsonl.gz", "starcoder/c-sharp-0044.json.gz"} <= set(names)
    assert set(yaml.safe_load((RECIPE / "blend.yaml").read_text())["corpora"]) == set(CORPORA)
    assert module.expand("a-{08..11}.gz") == ["a-08.gz", "a-09.gz", "a-10.gz", "a-11.gz"]


def test_download_list_and_verification(listing: Path, tmp_path: Path) -> None:
    assert recipe("verify", tmp_path / "none") == (1, f"recipe: error: {tmp_path}/none: no such folder\n")
    assert "Is a directory" in recipe("urls", "--output", tmp_path)[1]
    for options in ([], ["--listing", listing]):
        code, out = recipe("urls", *options, "--output", tmp_path / "urls.txt")
        assert code == 0 and "2903 addresses" in out
    addresses = (tmp_path / "urls.txt").read_text().split()
    assert len(set(addresses)) == 2903 and addresses[-1].endswith("/resolve/main/data/wiki/wiki-0001.json.gz")
    raw = tmp_path / "raw"
    for name in module.paths(MANIFEST):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_bytes(b"0123456789")
    code, out = recipe("verify", raw)
    assert code == 0 and "all 2903 files are there; their sizes were not compared" in out
    assert recipe("verify", raw, "--listing", listing)[0] == 0
    (raw / "wiki" / "wiki-0001.json.gz").write_bytes(b"0123")
    code, out = recipe("verify", raw, "--listing", listing)
    assert code == 1 and "wiki-0001.json.gz: 4 bytes, the listing says 10" in out
    (raw / "pes2o" / "pes2o-0003.json.gz").rename(raw / "pes2o" / "other.json.gz")
    code, out = recipe("verify", raw)
    assert code == 1 and "pes2o: 25 of 26 files" in out
    assert f"error: {raw}: 2 names unlike manifest.yaml: pes2o/pes2o-0003.json.gz: missing; pes2o/other" in out
    assert "pes2o-0003.json.gz: missing" in out and "pes2o/other.json.gz: not one of the data set" in out
    listing.write_text(json.dumps(json.loads(listing.read_text())[1:]))
    assert "algebraic-stack-train-0000.json.gz: missing" in recipe("urls", "--listing", listing)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "nowhere"), "recipe: error: nowhere: no such folder"),
        (("urls", "--output", "/nowhere/urls.txt"), "recipe: error: /nowhere/urls.txt: No such file or directory"),
        (("urls", "--base-url", "http://mirror/{file}"), "takes {dataset} and {path} alone: KeyError('file')"),
        (("verify", "nowhere", "--workers", "0"), "--workers: 0 must be at least 1"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: tuple[str, ...], message: str) -> None:
    code, out = recipe(*arguments)
    assert code != 0 and message in out


def test_archives_are_read_to_their_end_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = {
        "json_key": "text",
        "corpora": {
            "a": {"tokens": 1e9, "files": ["x.json.gz", "y.json.zst"]},
            "b": {"tokens": 1e9, "files": ["z.jsonl.gz"]},
        },
    }
    line = b'{"text": "some words"}\n' * 2000
    zstandard = pytest.importorskip("zstandard")
    contents = [gzip.compress(line), zstandard.ZstdCompressor().compress(line), gzip.compress(line)]
    for name, content in zip(module.paths(manifest), contents, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    sizes = str(tmp_path / "sizes.json")

    def run(action: str, **options: object) -> None:
        defaults = {"folder": str(tmp_path), "tokens": False, "listing": None, "deep": False, "workers": 1}
        getattr(module, action)(argparse.Namespace(**defaults | options), manifest)

    run("record", output=sizes)
    run("verify", listing=sizes, deep=True)
    assert "all 3 files are there, of the right size" in capsys.readouterr().out
    cases = [(name, contents[i][:-20], "cannot read on") for i, name in enumerate(module.paths(manifest))]
    cases += [("a/x.json.gz", gzip.compress(b'{"body": "none"}\n'), "text"), ("a/x.json.gz", b"", "empty")]
    both = dict(zip(module.paths(manifest), [b"", contents[1][:-20]], strict=False))
    for name, content, message in cases:
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"1 file damaged or .*: {tmp_path / name}.*{message}"):
            run("verify", deep=True)
        out = capsys.readouterr().out
        assert name in out and message in out
        (tmp_path / name).write_bytes(before)
    for name, content in both.items():  # all of it in one pass, each file once
        (tmp_path / name).write_bytes(content)
    with pytest.raises(
        DataError, match=r"2 files damaged .*x\.json\.gz: 0 bytes, the listing.*; .*y\.json\.zst: \d+ bytes"
    ):
        run("verify", listing=sizes, deep=True)
    with pytest.raises(DataError, match=r"2 files damaged .*x\.json\.gz: empty; .*y\.json\.zst:\d+: cannot read on"):
        run("verify", deep=True)
    for name, content in zip(both, contents, strict=False):
        (tmp_path / name).write_bytes(content)
    capsys.readouterr()
    flipped = bytearray(contents[0])
    flipped[4] ^= 1  # the time in the header: the same size and the same text
    (tmp_path / "a" / "x.json.gz").write_bytes(flipped)
    run("verify", listing=sizes)
    with pytest.raises(DataError, match="1 file damaged"):
        run("verify", listing=sizes, deep=True)
    assert "its hash is" in capsys.readouterr().out


def test_from_raw_files_to_a_blend(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    train_bpe(["some words to train on " * 20], 280, tmp_path / "tok")
    for corpus in CORPORA:
        folder = tmp_path / "raw" / corpus
        folder.mkdir(parents=True)
        for name in MANIFEST["corpora"][corpus]["files"][-2:]:
            content = b'{"text": "some words"}\n' * 3
            packed = gzip.compress(content) if name.endswith(".gz") else zstandard.ZstdCompressor().compress(content)
            (folder / name).write_bytes(packed)
    environment = {**os.environ, "WORKERS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(RECIPE / "tokenize.sh"), *(str(tmp_path / name) for name in ("raw", "tokens", "tok"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    sources = read_sources(DataConfig(data_file_list=str(tmp_path / "tokens" / "blend.yaml")))
    assert [corpus.name for corpus in sources.corpora] == list(CORPORA) and len(sources.prefixes) == 12
    code, out = recipe("verify", tmp_path / "tokens", "--tokens")
    assert code == 1 and "wiki: 2 of 2 files" in out and "dclm: 2 of 1970 files" in out
