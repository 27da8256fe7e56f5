"""BPE by fastokens: the ids of the tokenizers library, or not used."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.optimus.data.tokenize import fast_bpe
from megatron.optimus.data.tokenize.preprocess import preprocess
from megatron.optimus.data.tokenize.pretoken_cache import SPLIT_PATTERNS, Ids
from megatron.optimus.data.tokenize.tokenizer import HuggingFaceTokenizer, train_bpe
from tests.unit.data.tokenize.makers import CORPUS, TEXTS

NAMES = ["<|endoftext|> and <s> again <|endoftext|>", "<|im_start|>user\n<|im_start|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe")
    train_bpe(CORPUS * 20, 400, path, special_tokens=["<|im_start|>"])
    return path


def with_pre_tokenizer(folder: Path, target: Path, pattern: str, normalizer: dict[str, str] | None) -> Path:
    """The tokenizer with the cuts of Llama 3 or Qwen instead of GPT-2's."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    state = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    state["normalizer"] = normalizer
    (target / "tokenizer.json").write_text(json.dumps(state))
    return target


@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_are_those_of_the_library(folder: Path, tmp_path: Path, parse_special: bool) -> None:
    folders = [folder]
    folders += [with_pre_tokenizer(folder, tmp_path / str(n), one, None) for n, one in enumerate(SPLIT_PATTERNS)]
    folders += [with_pre_tokenizer(folder, tmp_path / "nfc", min(SPLIT_PATTERNS), {"type": "NFC"})]
    texts = [*TEXTS, *fast_bpe.HARD_TEXTS, *NAMES]
    for one in folders:
        tokenizer = HuggingFaceTokenizer(one, parse_special)
        slow = tokenizer._encode_with_library(texts)
        assert tokenizer.use_fastokens(NAMES)
        for text, ids, expected in zip(texts, tokenizer.encode_batch(texts), slow, strict=True):
            assert np.array_equal(ids, expected), (one, text)


def test_other_ids_or_a_missing_package_leave_the_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    load = fast_bpe.load

    def wrong(state: object, *, parse_special: bool) -> fast_bpe.Encode:
        right = load(tokenizer.state, parse_special=parse_special)
        assert right is not None

        def encode(texts: list[str]) -> list[Ids]:
            return [ids[:-1] if text == "of the corpus" else ids for text, ids in zip(texts, right(texts), strict=True)]

        return encode

    monkeypatch.setattr(fast_bpe, "load", wrong)
    with caplog.at_level(logging.WARNING, "optimus"):
        assert not tokenizer.use_fastokens(["of the corpus"])
    assert "other ids than the tokenizers library for 'of the corpus'" in caplog.text
    assert tokenizer.encode_batch(["of the corpus"])[0].tolist() == tokenizer.encode("of the corpus")
    assert tokenizer.use_fastokens([])
    monkeypatch.setattr(fast_bpe, "load", load)
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert not HuggingFaceTokenizer(folder).use_fastokens([])


def test_token_files_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, *NAMES] * 5))
    with caplog.at_level(logging.INFO, "optimus"):
        preprocess([str(corpus)], str(tmp_path / "fast"), tokenizer_model=str(folder), append_eod=True)
        assert "fastokens" in caplog.text
        caplog.clear()
        monkeypatch.setattr(fast_bpe, "load", lambda state, parse_special: None)
        preprocess([str(corpus)], str(tmp_path / "slow"), tokenizer_model=str(folder), append_eod=True)
        assert "fastokens" not in caplog.text
    for suffix in ("bin", "idx"):
        names = [tmp_path / f"{name}_text_document.{suffix}" for name in ("fast", "slow")]
        assert names[0].read_bytes() == names[1].read_bytes()
