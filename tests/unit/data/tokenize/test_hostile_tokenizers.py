"""Tokenizer files made to do harm: one clear error each, in bounded memory."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer, train_bpe

_ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["some text, and some more text"] * 4, 270, folder)
    return json.loads((folder / "tokenizer.json").read_text())


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())[:3]
    return [path for key, value in items for path in ((*prefix, key), *paths(value, (*prefix, key)))]


def test_every_field_of_a_wrong_type_is_one_error_or_none(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused = 0
    for path in paths(good):
        for wrong in (None, True, -1, 1 << 40, 1.5, "text", [], [[]], {}, {"type": "ByteLevel"}):
            body = json.loads(json.dumps(good))
            tree = body
            for key in path[:-1]:
                tree = tree[key]
            tree[path[-1]] = wrong
            (tmp_path / "tokenizer.json").write_text(json.dumps(body))
            try:
                build_tokenizer(TokenizerType.HF, tmp_path)
            except DataError as error:
                assert "tokenizer.json" in str(error)
                refused += 1
    assert refused > 20


_LIMITED = """
import resource, sys
from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize.tokenizer import build_tokenizer
import tokenizers, tiktoken, tiktoken_ext.openai_public
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), now + (1 << 30)))
try:
    build_tokenizer(TokenizerType(sys.argv[1]), sys.argv[2])
except DataError as error:
    print("refused:", error)
"""


def refused(kind: TokenizerType, path: Path) -> str:
    """What building it says, with 1 GiB of memory."""
    pytest.importorskip("tiktoken")
    words = [sys.executable, "-c", _LIMITED, kind.value, str(path)]
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("refused:") and done.returncode == 0, done.stdout + done.stderr[-1500:]
    return done.stdout


@pytest.mark.parametrize("field", ["vocab", "added_tokens"])
def test_an_id_of_2_to_the_31_takes_no_memory(good: dict[str, Any], tmp_path: Path, field: str) -> None:
    body = json.loads(json.dumps(good))
    if field == "vocab":
        body["model"]["vocab"]["zz"] = 1 << 31
    else:
        body["added_tokens"][0]["id"] = 1 << 31
        body["model"]["vocab"]["<|endoftext|>"] = 1 << 31
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    assert "they must lie in [0, 16777216)" in refused(TokenizerType.HF, tmp_path)


def ranks(*lines: str) -> str:
    return "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)) + "".join(lines)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (ranks("enp6 2147483648\n"), None),
        (ranks("enp6 -1\n"), None),
        (ranks("enp6 " + "9" * 5000 + "\n"), None),
        (ranks("enp6\n"), None),
        (ranks("enp6 1\n"), None),
        ("", None),
        (ranks(), "[" * 100_000),
        (ranks(), '{"end_of_text": 1e999}'),
        (ranks(), '{"end_of_text": 4294967296}'),
        (ranks(), '{"pattern": "("}'),
        (ranks(), '{"pattern": 3}'),
        (ranks(), '{"special_tokens": {"a": [1]}}'),
        (ranks(), '{"special_tokens": {"a": 2147483648}}'),
        (ranks(), "[]"),
    ],
)
def test_tiktoken_files(tmp_path: Path, content: str, options: str | None) -> None:
    pytest.importorskip("tiktoken")
    file = tmp_path / "a.tiktoken"
    file.write_text(content)
    if options is not None:
        (tmp_path / "a.tiktoken.json").write_text(options)
    with pytest.raises(DataError, match=r"a\.tiktoken: "):
        build_tokenizer(TokenizerType.TIKTOKEN, file)


def test_a_rank_of_2_to_the_31_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a.tiktoken").write_text(ranks("enp6 2147483648\n"))
    assert "they must lie in [0, 16777216)" in refused(TokenizerType.TIKTOKEN, tmp_path / "a.tiktoken")


def test_pipes_are_not_waited_for(good: dict[str, Any], tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "a.tiktoken", "b.tiktoken.json", "c.model"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(good))
    (tmp_path / "b.tiktoken").write_text(ranks())
    build_tokenizer(TokenizerType.HF, tmp_path)
    pytest.importorskip("tiktoken")
    build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "b.tiktoken")
    for kind, name in ((TokenizerType.TIKTOKEN, "a.tiktoken"), (TokenizerType.SENTENCEPIECE, "c.model")):
        with pytest.raises(DataError, match="no such file"):
            build_tokenizer(kind, tmp_path / name)


def test_a_vocabulary_of_nothing(tmp_path: Path, good: dict[str, Any]) -> None:
    body = json.loads(json.dumps(good)) | {"added_tokens": []}
    body["model"] |= {"vocab": {}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match="token ids run from 0 to -1"):
        build_tokenizer(TokenizerType.HF, tmp_path)
