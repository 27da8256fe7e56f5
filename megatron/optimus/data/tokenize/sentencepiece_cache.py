"""Ids of texts by a SentencePiece BPE from a table of words, as words.py has them for byte-level BPEs.

This BPE has no pre-tokenizer: it merges neighbours anywhere in a text, best pieces first. But it only ever makes pieces
of its vocabulary, so between two characters that no piece has next to each other nothing is merged, and what is merged
on one side does not depend on the other. Trainers keep scripts apart, digits by themselves and spaces in front; so in
most vocabularies letters, signs and line ends have no piece in common, and nothing but a space is joined to the space
before it. Whether it is so is looked up in the vocabulary; a model of another kind has no table.

A space is the character U+2581 to the model, which puts one before every text. What is not in the table is encoded
behind a line end, where no space is put before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_SPACE = " \u2581"
_SIGNS = r"!-/:-@\[-`{-~\x00-\x09\x0b-\x1f\x7f"  # and controls of ASCII, without the line end
_OTHER = "\x80-\u2580\u2582-\U0010ffff"
_WORDS = re.compile(  # where other characters than ASCII are near, a word goes on to the next space
    f"[{_SPACE}]*(?:[A-Za-z]+(?![A-Za-z{_OTHER}])|[{_SIGNS}]+(?![{_SIGNS}{_OTHER}])|[0-9](?![{_OTHER}])"
    f"|[^{_SPACE}\n]+)|\n|[{_SPACE}]+"
)
_JOINED = {  # kinds that may be next to each other in a piece
    *("  ", " a", " !", " 0", " é"),
    *("aa", "!!", "éé", "éa", "aé", "é!", "!é", "é0", "0é"),
}
_CACHED_WORDS, _CACHED_CHARACTERS = 1 << 18, 1 << 23  # per process, some 60 MB
_FEW_SPACES = 16  # characters for each space; with fewer spaces words hardly repeat

Ids = npt.NDArray[np.integer[Any]]


class SentenceTable:
    """``encode`` of texts by a SentencePieceProcessor, faster."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._before = "\n"
        self._skipped = 4 * len(processor.encode(self._before))  # bytes of its ids
        self._table: dict[str, bytes] = {}
        self._characters = 0

    @classmethod
    def of_model(cls, processor: Any) -> SentenceTable | None:
        """None if ids are not known to be those of words."""
        trainer, normalizer = _specs(processor.serialized_model_proto())
        is_bpe = trainer.get(3) == 2 and trainer.get(35) == 1 and not trainer.get(24)  # bytes for unknown characters
        is_plain = not normalizer.get(2) and normalizer.get(3, 1) and not normalizer.get(4, 1) and normalizer.get(5, 1)
        if not (is_bpe and is_plain):
            return None
        for i in range(processor.get_piece_size()):
            if not (processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i)):
                kinds = "".join(map(_kind, processor.id_to_piece(i)))
                if any(kinds[at : at + 2] not in _JOINED for at in range(len(kinds) - 1)):
                    return None
        return cls(processor)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Ids of each text, int32; may be read-only."""
        is_whole = [not text or text.count(" ") * _FEW_SPACES < len(text) for text in texts]
        words = [_WORDS.findall(f" {text}") for text, whole in zip(texts, is_whole, strict=True) if not whole]
        whole_texts = [text for text, whole in zip(texts, is_whole, strict=True) if whole]
        others = iter(self._processor.encode(whole_texts, num_threads=1, out_type="numpy"))
        try:
            found = iter(self._look_up(words))
        except KeyError:  # rare once the table is filled, so words are not looked up twice to find out
            self._fill({word for own in words for word in own})
            found = iter(self._look_up(words))
        return [next(others) if whole else next(found) for whole in is_whole]

    def _look_up(self, words: list[list[str]]) -> list[Ids]:
        table = self._table
        return [np.frombuffer(b"".join([table[word] for word in own]), np.int32) for own in words]

    def _fill(self, words: set[str]) -> None:
        if len(self._table) > _CACHED_WORDS or self._characters > _CACHED_CHARACTERS:
            self._table.clear()
            self._characters = 0
        missing = [word for word in words if word not in self._table]
        self._characters += sum(map(len, missing))
        encoded = self._processor.encode([self._before + word for word in missing], num_threads=1, out_type="numpy")
        for word, ids in zip(missing, encoded, strict=True):
            self._table[word] = ids.astype(np.int32, copy=False).tobytes()[self._skipped :]


def _kind(character: str) -> str:
    if character in _SPACE:
        return " "
    if not character.isascii():
        return "é"
    if character == "\n":
        return character
    return "a" if character.isalpha() else "0" if character.isdigit() else "!"


def _specs(model: bytes) -> tuple[dict[int, Any], dict[int, Any]]:
    """Fields of the specifications of trainer (2) and normalizer (3) in a serialized ModelProto, by number."""
    found = dict(_fields(model))
    return dict(_fields(found.get(2, b""))), dict(_fields(found.get(3, b"")))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, integer or bytes) of each field of a message in the wire format of protocol buffers."""
    at = 0

    def integer() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(integer(), 8)
        if kind == 0:
            yield number, integer()
            continue
        size = integer() if kind == 2 else {1: 8, 5: 4}[kind]
        yield number, message[at : at + size]
        at += size
