"""Pretoken caches: the ids are those of the library for any text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.tokenize import pretoken_cache
from megatron.optimus.data.tokenize.pretoken_cache import SPLIT_PATTERNS
from megatron.optimus.data.tokenize.tokenizer import (
    END_OF_TEXT,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    train_bpe,
)


def lists(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_bpe(["the cat's 12 hats... don't!\n  \n\tthen caf\u00e9 \u2028 x\xa0y"] * 9, 300, folder)
    return folder


_SPACES = st.sampled_from(
    [" ", "  ", "\n", "\t", "\r\n", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u180e", "\u200b", "\u2028"]
)
_TEXTS = st.lists(
    st.one_of(
        _SPACES,
        st.sampled_from(["a", "don't", "'s", "'", "12", "!", "...", "_", "\u00e9", "e", "\u0301", "\u00b2", "\u0660"]),
        st.text(max_size=3),
    )
)
_SPLITS = sorted(SPLIT_PATTERNS)
_PRE_TOKENIZERS = ["GPT-2", *_SPLITS]
_KINDS = "a1.' \n\r\t\u00e9"
_ADDED = {"id": 5000, "content": "a!", "special": False, "single_word": False, "lstrip": False, "rstrip": False}


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A BPE whose merges join any two and most three kinds of characters, so that a cut in a wrong place shows."""
    from tokenizers import Tokenizer as BPETokenizer
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = BPETokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    texts = ["".join(text) for count in (2, 3) for text in itertools.product(_KINDS, repeat=count)]
    tokenizer.train_from_iterator(iter(texts * 2), trainer)
    return {**json.loads(tokenizer.to_str()), "folder": tmp_path_factory.mktemp("joining")}


def variant(joining: dict[str, Any], split: str, normalizer: object = None, added: object = None) -> Tokenizer:
    """The joining tokenizer behind one of the pre-tokenizers."""
    own: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    rule = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    cutting = {"type": "Sequence", "pretokenizers": [rule, own | {"use_regex": False}]}
    state = {name: value for name, value in joining.items() if name != "folder"}
    state |= {"normalizer": normalizer, "pre_tokenizer": own | {"use_regex": True} if split == "GPT-2" else cutting}
    state["added_tokens"] = [*state["added_tokens"], *([added] if added else [])]
    (joining["folder"] / "variant.json").write_text(json.dumps(state))
    return build_tokenizer(TokenizerType.HF, joining["folder"] / "variant.json")


def has_cache(tokenizer: Tokenizer) -> bool:
    return tokenizer._cache is not None  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(_TEXTS.map("".join), max_size=4))
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("split", _PRE_TOKENIZERS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_cached_pretokens_give_the_ids_of_the_library(
    joining: dict[str, Any], split: str, normalizer: object, texts: list[str]
) -> None:
    tokenizer = variant(joining, split, normalizer)
    assert has_cache(tokenizer)
    for _ in range(2):  # pre-tokens not seen before, then from the cache
        assert lists(tokenizer, texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("split", _PRE_TOKENIZERS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_every_character_between_words_gives_the_ids_of_the_library(joining: dict[str, Any], split: str) -> None:
    tokenizer = variant(joining, split)
    characters = [chr(i) for i in range(0x3100) if not 0xD800 <= i < 0xE000] + ["\ufeff", "\U0001f600"]
    texts = [f"a{c}b !{c}! 1{c}{c}2 {c} x{c} '{c}'s {c}' \n{c} (x{c}\n  {c}y{c}\n\n{c}" for c in characters]
    assert lists(tokenizer, texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("split", _PRE_TOKENIZERS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_all_short_texts_of_all_kinds_of_characters(joining: dict[str, Any], split: str) -> None:
    tokenizer = variant(joining, split)
    texts = ["".join(text) for text in itertools.product(_KINDS, repeat=5)]
    assert lists(tokenizer, texts) == [tokenizer.encode(text) for text in texts]


def test_cache_is_emptied_when_full(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretoken_cache, "_CACHED_PRETOKENS", 3)
    tokenizer = build_tokenizer(TokenizerType.HF, trained)
    for text in ("one two three four five", "one six", "two one seven"):
        assert lists(tokenizer, [text]) == [tokenizer.encode(text)]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("content", ["a!", "!\n", "  ", "K", "\u00e9"])
@pytest.mark.parametrize("split", _PRE_TOKENIZERS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_texts_with_added_tokens_come_from_the_library(
    joining: dict[str, Any], split: str, content: str, normalized: bool
) -> None:
    """An added token that is not special is looked for before words are cut, so it may lie across a cut."""
    tokenizer = variant(joining, split, {"type": "NFC"}, _ADDED | {"content": content, "normalized": normalized})
    assert has_cache(tokenizer) is not (normalized and content in ("K", "\u00e9"))
    texts = ["b a! c", "ba! !\n c", "a  b c", "c \u212a e\u0301", "cat's", "", "K"]
    assert lists(tokenizer, texts) == [tokenizer.encode(text) for text in texts]


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
