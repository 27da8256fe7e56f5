"""The command that trains a tokenizer: what it refuses is one line."""

from __future__ import annotations

from pathlib import Path

from tests.unit.commands.programs import call, failed


def test_tokenizer_errors(corpus: Path, tmp_path: Path) -> None:
    script = "tools/train_tokenizer.py"
    assert "vocab_size=10" in failed(call(script, "--input", corpus, "--vocab-size", 10, "--output", tmp_path / "t"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text"\n')
    assert "bad.jsonl:2: not JSON" in failed(
        call(script, "--input", bad, "--vocab-size", 300, "--output", tmp_path / "t")
    )
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]
    skipped = call(script, "--input", bad, "--vocab-size", 300, "--output", tmp_path / "t", "--skip-malformed")
    assert skipped.returncode == 0 and "1 malformed lines skipped" in skipped.stderr
