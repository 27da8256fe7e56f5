"""Tokenizers: what goes in comes out, errors name the path, a trained one loads in transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.tokenize.preprocess import preprocess
from megatron.optimus.data.tokenize.tokenizer import (
    END_OF_TEXT,
    ByteLevelTokenizer,
    Tokenizer,
    build_tokenizer,
    byte_lengths,
    train_bpe,
)
from tests.unit.data.tokenize.makers import tokenizer_of

from .makers import tiktoken_file

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n\tpass  # größer, 日本語 🙂\n", "", "a\r\n\r\n  b", "x" * 300]


def lists(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_bpe((text for text in TEXTS * 20), 300, folder)
    return folder


def test_trained_bpe_round_trip(folder: Path) -> None:
    tokenizer = build_tokenizer(TokenizerType.HF, folder)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 0)
    batch = lists(tokenizer, TEXTS)
    for text, ids in zip(TEXTS, batch, strict=True):
        assert ids == tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 < i < 300 for i in ids)
    assert len(batch[0]) < len(TEXTS[0].encode())
    assert tokenizer.decode([0, *batch[0], 0, 5000]) == TEXTS[0]
    assert build_tokenizer(TokenizerType.HF, folder / "tokenizer.json").eod_id == 0


def test_a_document_cannot_forge_its_end(folder: Path) -> None:
    tokenizer = build_tokenizer(TokenizerType.HF, folder)
    text = f"before {END_OF_TEXT} after"
    assert tokenizer.eod_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


SPELLED = ["<|endoftext|>", "a<|endoftext|>\n b<|endoftext|>", "no <|end of text|>", "ends <fim_prefix>x", "x  <|end"]


def test_special_tokens_of_a_text_are_parsed_where_asked(folder: Path, tmp_path: Path) -> None:
    """Ids are those of transformers and of tiktoken with all of its special tokens allowed."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    parsed, text = (build_tokenizer(TokenizerType.HF, folder, parse_special=parse) for parse in (True, False))
    expected = [theirs(one, add_special_tokens=False)["input_ids"] for one in SPELLED + TEXTS]
    assert lists(parsed, SPELLED + TEXTS) == expected == [parsed.encode(one) for one in SPELLED + TEXTS]
    assert expected[0] == [parsed.eod_id] and text.encode(SPELLED[0]) != expected[0]
    assert lists(text, TEXTS) == expected[len(SPELLED) :]

    pytest.importorskip("tiktoken")
    file = tiktoken_file(tmp_path / "words.tiktoken")
    parsed, text = (build_tokenizer(TokenizerType.TIKTOKEN, file, parse_special=parse) for parse in (True, False))
    expected = [parsed._encoding.encode(one, allowed_special="all") for one in SPELLED + TEXTS]
    assert lists(parsed, SPELLED + TEXTS) == expected == [parsed.encode(one) for one in SPELLED + TEXTS]
    assert expected[0] == [parsed.eod_id] and parsed.eod_id not in text.encode(SPELLED[0])
    with pytest.raises(DataError, match="--parse-special-tokens: ByteLevelTokenizer finds no names"):
        build_tokenizer(TokenizerType.BYTE, None, parse_special=True)


def test_a_run_that_parses_is_not_mixed_with_one_that_does_not(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": SPELLED[1]}) + "\n")
    prefix = str(tmp_path / "out")

    def tokenize(rank: int, parse: bool) -> None:
        options = dict(tokenizer_model=str(folder), append_eod=True, parse_special_tokens=parse)
        preprocess([str(tmp_path / "*.jsonl")], prefix, rank=rank, world_size=2, **options)

    tokenize(0, True)
    with pytest.raises(DataError, match=r"was begun with other options \(parse_special_tokens\)"):
        tokenize(1, False)
    tokenize(1, True)
    eod, documents = build_tokenizer(None, folder).eod_id, IndexedDataset(f"{prefix}_text_document")
    assert [list(documents.get(i)).count(eod) for i in range(2)] == [3, 3]


def test_training_is_deterministic(folder: Path, tmp_path: Path) -> None:
    train_bpe(iter(TEXTS * 20), 300, tmp_path)
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_trained_bpe_loads_in_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = build_tokenizer(TokenizerType.HF, folder)
    for cls in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = cls.from_pretrained(str(folder))
        assert (len(theirs), theirs.eos_token, theirs.eos_token_id) == (300, END_OF_TEXT, 0)
        for text in TEXTS:
            assert theirs(text).input_ids == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == text


def test_small_corpus_gives_fewer_tokens_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_bpe(["ab"], 400, tmp_path)
    assert "of 400 tokens" in caplog.text
    with pytest.raises(DataError, match="vocab_size=256 is too small"):
        train_bpe(["ab"], 256, tmp_path)
    never = (pytest.fail("texts are read before the folder is made") for _ in "x")
    with pytest.raises(DataError, match="vocab_size=100000000000 is too large; use at most 16777216"):
        train_bpe(never, 10**11, tmp_path)
    with pytest.raises(DataError, match="a special token is empty"):
        train_bpe(never, 300, tmp_path, ["<a>", ""])
    with pytest.raises(DataError, match="cannot write the tokenizer: Not a directory"):
        train_bpe(never, 300, "/dev/null/x")


def test_saved_truncation_and_padding_are_not_applied(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(TokenizerType.HF, tmp_path)
    assert lists(ours, TEXTS) == lists(build_tokenizer(TokenizerType.HF, folder), TEXTS)


@pytest.mark.parametrize("eos", ["!", {"content": "!"}])
def test_end_of_document_from_the_configuration(folder: Path, tmp_path: Path, eos: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert build_tokenizer(TokenizerType.HF, tmp_path).eod_id == 0
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": eos}))
    tokenizer = build_tokenizer(TokenizerType.HF, tmp_path)
    assert tokenizer.eod_id == tokenizer.encode("!")[0] != 0
    config.write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(DataError, match=r"no '</s>' to end documents with"):
        build_tokenizer(TokenizerType.HF, tmp_path)
    config.write_text("[")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not a JSON object"):
        build_tokenizer(TokenizerType.HF, tmp_path)


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs --tokenizer-model"):
        build_tokenizer(TokenizerType.HF, None)
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; .*train one"):
        build_tokenizer(TokenizerType.HF, tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        build_tokenizer(TokenizerType.HF, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        build_tokenizer(TokenizerType.HF, tmp_path)
    with pytest.raises(DataError, match=r"x\.model: no such file"):
        build_tokenizer(TokenizerType.SENTENCEPIECE, tmp_path / "x.model")


def test_bytes() -> None:
    tokenizer = build_tokenizer(TokenizerType.BYTE, None)
    assert isinstance(tokenizer, ByteLevelTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert [tokenizer.decode([*ids, 256, 999]) for ids in lists(tokenizer, TEXTS)] == TEXTS
    assert tokenizer.encode("ä") == [0xC3, 0xA4]


def test_sentencepiece(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    text = "the quick brown fox jumps over the lazy dog"
    options = {"sentence_iterator": iter([text] * 50), "vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    spm.SentencePieceTrainer.train(model_prefix=str(tmp_path / "sp"), **options)
    tokenizer = build_tokenizer(TokenizerType.SENTENCEPIECE, tmp_path / "sp.model")
    (ids, empty) = lists(tokenizer, [text, ""])
    assert ids == tokenizer.encode(text) and empty == []
    assert max(ids) < tokenizer.vocab_size and tokenizer.eod_id == 2 and 2 not in ids
    assert tokenizer.decode([*ids, 2, 10_000]) == text
    (tmp_path / "bad.model").write_bytes(b"\xff" * 64)
    with pytest.raises(DataError, match=r"bad\.model: not a SentencePiece model"):
        build_tokenizer(TokenizerType.SENTENCEPIECE, tmp_path / "bad.model")


def test_tiktoken_file(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (tmp_path / "v.tiktoken").write_bytes(b"\n".join(lines))
    tokenizer = build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "v.tiktoken")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (259, 258)
    assert tokenizer.encode("the") == [257] and tokenizer.encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert lists(tokenizer, ["the", "", "t\u00e9"]) == [[257], [], [116, 0xC3, 0xA9]]
    forged = f"the {END_OF_TEXT}the"  # names of special tokens are text to both
    assert lists(tokenizer, [forged]) == [tokenizer.encode(forged)] == [[257, 32, *END_OF_TEXT.encode(), 257]]
    assert tokenizer.decode([257, 258, 32, 999]) == "the "
    (tmp_path / "words").write_text('{"text": "no tokens"}')
    with pytest.raises(DataError, match=r"words: not a \.tiktoken file .*: line 1 is no token in base64 and its rank"):
        build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "words")
    (tmp_path / "v.tiktoken.json").write_text('{"end_of_text": 300, "pattern": "."}')
    assert build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "v.tiktoken").vocab_size == 301
    for content in (b"no base64 at all", b"dGg=", b""):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(DataError, match=r"bad: not a \.tiktoken file"):
            build_tokenizer(TokenizerType.TIKTOKEN, tmp_path / "bad")


def test_libraries_too_old_for_arrays_of_ids_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spm, tiktoken = pytest.importorskip("sentencepiece"), pytest.importorskip("tiktoken")
    monkeypatch.delattr(spm.SentencePieceProcessor, "EncodeAsNumpy")
    with pytest.raises(DataError, match=r"before 0\.2\.3: pip install --upgrade sentencepiece"):
        build_tokenizer(TokenizerType.SENTENCEPIECE, tmp_path)
    monkeypatch.delattr(tiktoken.Encoding, "encode_to_numpy")
    with pytest.raises(DataError, match=r"before 0\.11: pip install --upgrade tiktoken"):
        build_tokenizer(TokenizerType.TIKTOKEN, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_bpe(["the cat's 12 hats... don't!\n  \n\tthen caf\u00e9 \u2028 x\xa0y"] * 9, 300, folder)
    return folder


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(-1, 310), max_size=30))
def test_text_of_any_ids_is_that_of_the_library(trained: Path, ids: list[int]) -> None:
    """Also parts of characters, special tokens, and ids outside the vocabulary."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(trained / "tokenizer.json"))
    known = [i for i in ids if i >= 0]
    tokenizer = build_tokenizer(TokenizerType.HF, trained)
    assert tokenizer._bytes is not None  # type: ignore[attr-defined]
    assert tokenizer.decode(ids) == library.decode(known, skip_special_tokens=True)


def test_text_comes_from_the_library_where_tokens_are_not_bytes(trained: Path) -> None:
    state = json.loads((trained / "tokenizer.json").read_text())
    new = 1 + max(state["model"]["vocab"].values())
    added = {"id": new, "content": "x y", "special": False, "single_word": False, "lstrip": False, "rstrip": False}
    state["added_tokens"].append(added | {"normalized": False})
    (trained / "spaced.json").write_text(json.dumps(state))
    assert build_tokenizer(TokenizerType.HF, trained / "spaced.json").decode([new]) == "x y"


def test_byte_lengths_add_up_to_the_text(tmp_path: Path) -> None:
    text = "naïve birds 🙂 and 12 trees\n\tthe cat, the cat"
    for kind in (TokenizerType.HF, TokenizerType.TIKTOKEN, TokenizerType.BYTE):
        tokenizer = build_tokenizer(kind, tokenizer_of(kind, tmp_path / kind.value))
        lengths = byte_lengths(tokenizer)
        assert lengths is not None and not lengths.get(tokenizer.eod_id)
        ids = tokenizer.encode(text)
        assert sum(lengths[i] for i in ids) == len(text.encode())
    sentencepiece = tokenizer_of(TokenizerType.SENTENCEPIECE, tmp_path / "sp")
    assert byte_lengths(build_tokenizer(TokenizerType.SENTENCEPIECE, sentencepiece)) is None, "it adds a space"
