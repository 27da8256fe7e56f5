"""The pretoken cache of SentencePiece: the ids are those of the library for any text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.data.tokenize import pretoken_cache
from megatron.optimus.data.tokenize.tokenizer import SentencePieceTokenizer

TEXT = (
    "def add(first, second):\n    return first + second  # the sum, naïve but exact… \n\tif x >= 10: l'été\n"
    '    print("don\'t", x["key"], 3.14159, 日本語 のテキスト, \N{GRINNING FACE}\N{GRINNING FACE})  #   "end"\n'
    "The cat sat on the mat; the other cat (a fat one) sat there, too -- and then it was 12 o'clock.\n"
)
LLAMA: dict[str, Any] = {  # settings of Llama 2
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}


def model(folder: Path, **options: Any) -> SentencePieceTokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((TEXT * 3).split("\n")),
        model_prefix=str(folder / "sp"),
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": 500, **LLAMA, **options},
    )
    return SentencePieceTokenizer(folder / "sp.model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    mixed = [
        "1é",
        "é1",
        "aé",
        "éa",
        ".é",
        "é.",
        "\u2581é",
        "((",
    ]  # pieces of letters that are not ASCII and of anything
    tokenizer = model(tmp_path_factory.mktemp("sp"), user_defined_symbols=mixed)
    assert tokenizer._cache is not None
    return tokenizer


def check(tokenizer: SentencePieceTokenizer, texts: list[str]) -> None:
    wanted = tokenizer.processor.encode(texts)
    for _ in range(2):  # the second time all is in the cache
        got = tokenizer.encode_batch(texts)
        bad = [text for text, ids, own in zip(texts, got, wanted, strict=True) if ids.tolist() != own]
        assert not bad, bad[:3]


def test_sentencepiece_short_texts_of_all_kinds_of_characters(
    tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretoken_cache, "_FEW_SPACES", 10**9)  # all through the cache
    kinds = "ta ,.\n15é\u2581\t"
    check(tokenizer, ["".join(text) for size in range(5) for text in itertools.product(kinds, repeat=size)])
    check(tokenizer, [f"the ca{chr(i)}t .{chr(i)} 1{chr(i)}" for i in range(0x3100) if not 0xD800 <= i < 0xE000])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.sampled_from(TEXT + " \t\r\n\u2581\u3000ü\ufffd\0"), max_size=200), max_size=5))
def test_sentencepiece_random_texts(tokenizer: SentencePieceTokenizer, texts: list[str]) -> None:
    check(tokenizer, [*texts, TEXT])


def test_sentencepiece_cache_is_emptied_when_full(
    tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretoken_cache, "_CACHED_CHARACTERS", 10)
    check(tokenizer, [TEXT, "one two", TEXT])
    check(tokenizer, ["three four " * 3])
    assert tokenizer._cache is not None and 0 < len(tokenizer._cache) < 10


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 330},  # sums of probabilities are not exact
        {"byte_fallback": False},  # unknown characters in a row are one id
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": False},
        {"treat_whitespace_as_suffix": True},
        {"split_by_whitespace": False, "vocab_size": 800},
        {"split_by_unicode_script": False},
        {"user_defined_symbols": ["\n\n"]},
        {"user_defined_symbols": ["a.b"]},
    ],
    ids=str,
)
def test_sentencepiece_models_of_other_kinds_go_to_the_library(tmp_path: Path, options: dict[str, Any]) -> None:
    tokenizer = model(tmp_path, **options)
    assert tokenizer._cache is None
    check(tokenizer, [TEXT, "", " x"])
