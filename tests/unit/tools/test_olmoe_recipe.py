"""The OLMoE-mix-0924 recipe on a small stand-in: listing, download list, verification, tokens, blend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.optimus.config.schema import DataConfig
from megatron.optimus.data.sources import read_sources
from megatron.optimus.data.tokenizer import train_bpe

from .test_preprocess_data import ROOT

RECIPE = ROOT / "examples" / "data" / "olmoe_mix_0924"
CORPORA = yaml.safe_load((RECIPE / "manifest.yaml").read_text())["corpora"]


def recipe(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, str(RECIPE / "recipe.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    files = [f"data/{corpus}/part-{i:04}.json.gz" for corpus, number in CORPORA.items() for i in range(number)]
    entries = [{"path": path, "size": 10, "type": "file"} for path in files]
    path = tmp_path / "listing.json"
    path.write_text(json.dumps([*entries, {"path": "README.md", "size": 7}, {"path": "data/dclm", "size": 0}]))
    return path


def test_numbers_of_the_manifest() -> None:
    assert CORPORA == {
        "algebraic-stack": 16,
        "dclm": 1970,
        "open-web-math": 26,
        "pes2o": 26,
        "starcoder": 863,
        "wiki": 2,
    }
    assert sum(CORPORA.values()) == 2903
    assert set(yaml.safe_load((RECIPE / "blend.yaml").read_text())["corpora"]) == set(CORPORA)


def test_download_list_and_verification(listing: Path, tmp_path: Path) -> None:
    code, out = recipe("urls", listing, "--output", tmp_path / "urls.txt")
    assert code == 0 and "2903 addresses" in out
    addresses = (tmp_path / "urls.txt").read_text().split()
    assert len(set(addresses)) == 2903 and all(address.endswith(".json.gz") for address in addresses)
    raw = tmp_path / "raw"
    for corpus, number in CORPORA.items():
        (raw / corpus).mkdir(parents=True)
        for i in range(number):
            (raw / corpus / f"part-{i:04}.json.gz").write_bytes(b"0123456789")
    assert recipe("verify", raw, "--listing", listing)[0] == 0
    (raw / "wiki" / "part-0001.json.gz").write_bytes(b"0123")
    (raw / "pes2o" / "part-0003.json.gz").unlink()
    code, out = recipe("verify", raw, "--listing", listing)
    assert (
        code == 1 and "part-0001.json.gz: 4 bytes, the listing says 10" in out and "part-0003.json.gz: missing" in out
    )
    code, out = recipe("verify", raw)
    assert code == 1 and "pes2o differ from manifest.yaml" in out
    listing.write_text(json.dumps(json.loads(listing.read_text())[1:]))
    assert "algebraic-stack differ" in recipe("urls", listing, "--output", tmp_path / "urls.txt")[1]


def test_from_raw_files_to_a_blend(tmp_path: Path) -> None:
    train_bpe(["some words to train on " * 20], 280, tmp_path / "tok")
    for corpus in CORPORA:
        folder = tmp_path / "raw" / corpus / "train"
        folder.mkdir(parents=True)
        for i in range(2):
            (folder / f"part-{i}.jsonl").write_text('{"text": "some words"}\n' * 3)
    environment = {**os.environ, "WORKERS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(RECIPE / "tokenize.sh"), *(str(tmp_path / name) for name in ("raw", "tokens", "tok"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    sources = read_sources(DataConfig(data_file_list=str(tmp_path / "tokens" / "blend.yaml")))
    assert [corpus.name for corpus in sources.corpora] == list(CORPORA) and len(sources.prefixes) == 12
    code, out = recipe("verify", tmp_path / "tokens", "--tokens")
    assert code == 1 and "wiki: 2 of 2 files" in out and "dclm: 2 of 1970 files" in out
