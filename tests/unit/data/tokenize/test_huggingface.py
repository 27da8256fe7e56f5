"""Translated tokenizers give the ids of ours; where they cannot, they say so."""

from __future__ import annotations

import base64
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.tokenize import huggingface
from megatron.optimus.data.tokenize.huggingface import to_huggingface
from megatron.optimus.data.tokenize.tokenizer import Tokenizer, build_tokenizer
from tests.unit.data.tokenize.makers import TEXTS, sentencepiece_model, tiktoken_file


def translated(tokenizer: Tokenizer) -> tuple[LibraryTokenizer, list[str]]:
    made = to_huggingface(tokenizer)
    library = LibraryTokenizer.from_str(made.files["tokenizer.json"].decode())
    library.encode_special_tokens = True
    return library, made.problems


def assert_same_ids(ours: Tokenizer, theirs: LibraryTokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids), text


def test_bytes() -> None:
    tokenizer = build_tokenizer(TokenizerType.BYTE, None)
    theirs, problems = translated(tokenizer)
    assert problems == [] and theirs.get_vocab_size() == 257 and theirs.token_to_id("<|endoftext|>") == 256
    assert_same_ids(tokenizer, theirs, TEXTS)


@pytest.mark.parametrize("pattern", [None, r"\p{L}+|\s+", r"(?i:'s|'t)|\p{N}{1,3}| ?[^\s\p{N}]+|\s+(?!\S)|\s+"])
def test_tiktoken(tmp_path: Path, pattern: str | None) -> None:
    """Also with a pattern that leaves parts of texts out, and with ids of special tokens beyond the ranks."""
    pytest.importorskip("tiktoken")
    tokenizer = build_tokenizer(TokenizerType.TIKTOKEN, tiktoken_file(tmp_path / "v.tiktoken", pattern))
    theirs, problems = translated(tokenizer)
    assert problems == []
    assert_same_ids(tokenizer, theirs, TEXTS)
    assert theirs.token_to_id("<|im_start|>") == tokenizer.token_id("<|im_start|>") == tokenizer.vocab_size - 1
    if pattern is None:  # a word with the name of a special token is that token to the library, whatever it is asked
        assert theirs.encode("<|im_start|>").ids == tokenizer.encode("<|im_start|>")


@pytest.mark.parametrize("seed", range(40))
def test_tiktoken_of_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ranks in any order, with tokens that no merging reaches: one merge a token is exact."""
    pytest.importorskip("tiktoken")
    monkeypatch.setattr(huggingface, "_probes", lambda tokenizer: [])  # a second each; the texts here are of "ab"
    draw = random.Random(seed)
    longer = {bytes(draw.choices(b"ab", k=draw.randint(2, 6))) for _ in range(draw.randint(2, 25))}
    tokens = [bytes([i]) for i in range(256)] + draw.sample(sorted(longer), len(longer))
    path = tmp_path / "v.tiktoken"
    path.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)))
    (tmp_path / "v.tiktoken.json").write_text(json.dumps({"pattern": "[ab]+"}))
    tokenizer = build_tokenizer(TokenizerType.TIKTOKEN, path)
    theirs, _ = translated(tokenizer)
    assert_same_ids(tokenizer, theirs, ["".join(draw.choices("ab", k=draw.randint(1, 24))) for _ in range(300)])


def test_tiktoken_without_a_byte(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    (tmp_path / "v.tiktoken").write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(bytes([i])), i) for i in range(255)))
    with pytest.raises(DataError, match=r"lack the byte 0xff \(1 bytes in all\)"):
        to_huggingface(build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "v.tiktoken"))


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe"},
        {"model_type": "char"},
        {"model_type": "unigram", "user_defined_symbols": ["<fim>", "<|a|>"], "pad_id": 3},
        {"model_type": "unigram", "remove_extra_whitespaces": False, "byte_fallback": True},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True},
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    ],
)
def test_sentencepiece(tmp_path: Path, options: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(TokenizerType.SENTENCEPIECE, sentencepiece_model(tmp_path / "sp", **options))
    theirs, problems = translated(tokenizer)
    # The library normalizes sequences of combining characters in another way than SentencePiece.
    # It may also take the name of a byte for that byte where the name's characters are unknown.
    assert len(problems) <= 1
    for problem in problems:
        assert re.match(
            r"[12] of \d+ probe texts have other ids, such as ('e\\u0301\\u0301 [^']+'|'<0x41>'|, )+$", problem
        )
    for text in TEXTS if "<0x41>" not in str(problems) else TEXTS[:-1]:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text
        if 0 not in ids:  # an unknown character has no text
            assert theirs.decode(ids) == tokenizer.decode(ids), text


def test_what_is_not_exact_is_said(tmp_path: Path) -> None:
    """A symbol of the user's inside a text: the library normalizes what stands before and behind it apart."""
    options = {"model_type": "bpe", "user_defined_symbols": ["of"]}
    tokenizer = build_tokenizer(TokenizerType.SENTENCEPIECE, sentencepiece_model(tmp_path / "sp", **options))
    _, problems = translated(tokenizer)
    assert len(problems) == 1 and "probe texts have other ids, such as" in problems[0]
    model = sentencepiece_model(tmp_path / "word", model_type="word", vocab_size=40)
    with pytest.raises(DataError, match="models of type 3 have no equivalent"):
        to_huggingface(build_tokenizer(TokenizerType.SENTENCEPIECE, model))
