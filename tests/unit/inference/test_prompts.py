"""Prompts of the command line and of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.optimus.data.errors import DataError
from megatron.optimus.inference.prompts import read_prompts


def test_prompts_of_both_in_order(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "b\\n", "other": 1}\n\n{"prompt": ""}\r\n{"prompt": "é🙂"}', encoding="utf-8")
    assert read_prompts(["a"], file) == ["a", "b\n", "", "é🙂"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts; write"),
        (b"\n \n", "has no prompts"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not valid UTF-8 at byte 12"),
        (b'{"prompt": "a"', "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'["a"]', 'needs an object with a string "prompt"'),
        (b'{"text": "a"}', 'needs an object with a string "prompt"'),
        (b'{"prompt": 3}', 'needs an object with a string "prompt"'),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_malformed_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_prompts([], file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataError, match=str(path)):
            read_prompts([], path)


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(DataError, match=r"--prompt 2 is not valid UTF-8: 'a\\udcff'"):
        read_prompts(["fine", "a\udcff"], None)
