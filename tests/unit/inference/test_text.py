"""Text of tokens that come one at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megatron.optimus.config.schema import TokenizerType
from megatron.optimus.data.tokenize.tokenizer import ByteLevelTokenizer, build_tokenizer, train_bpe
from megatron.optimus.inference.text import TextStream

BYTES = ByteLevelTokenizer()
TEXTS = ["", "plain", "naïve café", "日本語のテキスト", "🙂🙃 and 👩‍👩‍👧", "a\ufffdb", "\ufffd"]


def pieces(stream: TextStream, ids: Sequence[int]) -> list[str]:
    found = []
    for token in ids:
        if stream.stopped:
            break
        found.append(stream.add(token))
    return [*found, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str) -> None:
    stream = TextStream(BYTES)
    assert "".join(pieces(stream, BYTES.encode(text))) == text == stream.text


def test_no_half_character_is_shown() -> None:
    assert pieces(TextStream(BYTES), BYTES.encode("é🙂!")) == ["", "é", "", "", "", "🙂", "!", ""]


def test_bytes_that_are_no_text_do_not_stop_the_stream() -> None:
    stream = TextStream(BYTES)
    ids = [0xE9, *b"abc", *[0x80] * 40, *b"z", 0xF0]
    assert "".join(pieces(stream, ids)) == BYTES.decode(ids)
    generator = random.Random(0)
    for _ in range(50):
        ids = [generator.randrange(257) for _ in range(60)]
        assert "".join(pieces(TextStream(BYTES), ids)) == BYTES.decode(ids)


def test_a_trained_tokenizer_gives_the_same_text_in_pieces(tmp_path) -> None:
    train_bpe(["the cat sat on the mat, naïve café 🙂 " * 20], 300, tmp_path)
    tokenizer = build_tokenizer(TokenizerType.HF, tmp_path)
    text = "the naïve cat 🙂 sat; 日本 on the mat"
    assert "".join(pieces(TextStream(tokenizer), tokenizer.encode(text))) == text


class Words(ByteLevelTokenizer):
    """As SentencePiece: a space before every word but the first of what is decoded."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join("abc"[i] * 3 for i in ids if i < 3)  # the others have no text


def test_a_tokenizer_that_drops_the_first_space_keeps_the_others() -> None:
    assert "".join(pieces(TextStream(Words()), [0, 1, 7, 7, 2, 0])) == "aaa bbb ccc aaa"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("aab", ["ab"], "a"),
        ("aaab", ["aab"], "a"),
        ("end", ["end"], ""),
        ("abcd", ["cd", "bc"], "a"),
        ("x🙂y", ["🙂"], "x"),
        ("xab", ["abc"], "xab"),
        ("Question: 1\nQuestion", ["\nQuestion:"], "Question: 1\nQuestion"),
    ],
)
def test_stop_strings_end_the_text(text: str, stops: list[str], expected: str) -> None:
    stream = TextStream(BYTES, stops)
    assert "".join(pieces(stream, BYTES.encode(text))) == expected == stream.text
    assert stream.stopped is any(stop in text for stop in stops)


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert pieces(TextStream(BYTES, ["STOP"]), BYTES.encode("xSTy")) == ["x", "", "", "STy", ""]


def test_a_stop_string_inside_one_token_cuts_what_follows(tmp_path) -> None:
    train_bpe(["well. Next well. Next " * 50], 290, tmp_path)
    tokenizer = build_tokenizer(TokenizerType.HF, tmp_path)
    ids = tokenizer.encode("well. Next well. Next ")
    assert len(ids) < 8  # so that the stop string begins and ends inside tokens
    stream = TextStream(tokenizer, [". "])
    assert "".join(pieces(stream, ids)) == "well"
