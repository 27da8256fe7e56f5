"""The command that makes tasks of held-out texts: what it refuses is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.optimus.commands.make_tasks import main
from tests.unit.inference.cases import pair_of_documents

pytest.importorskip("lm_eval")


def test_what_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = pair_of_documents(tmp_path)
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"text": "few words"}) + "\n")
    corpus = [str(pair), "--out", str(tmp_path)]
    for words, message in {
        (str(one), "--out", str(tmp_path)): "1 texts have 0 passages of 48 words; 20 are needed at least",
        (str(tmp_path / "none"), "--out", str(tmp_path)): f"{tmp_path / 'none'}: no such file",
        (*corpus, "--part", "test"): "no whole document is in the test split (969,30,1)",
        (*corpus, "--tokenizer-model", str(tmp_path / "gone")): "gone",
    }.items():
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
