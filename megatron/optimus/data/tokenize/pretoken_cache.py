"""The pretoken cache of SentencePiece BPEs, and which BPEs of the ``tokenizers`` library cut texts between words.

``SentencePieceCache`` encodes texts by looking up the ids of their words, most of which repeat. A text is cut where no
token can cross, and the ids of each piece, a *pre-token*, come from a table; the library encodes those that are not in
it. The ids are those that the library gives for the whole text. SentencePiece's BPE has no pre-tokenizer: it
merges neighbours anywhere in a text, best pieces first. But it only ever makes pieces of its vocabulary, so between two
characters that no piece has next to each other nothing is merged, and what is merged on one side does not depend on the
other. Trainers keep scripts apart, digits by themselves and spaces in front; so in most vocabularies letters, signs and
line ends have no piece in common, and only a space is joined to the space before it. Whether that holds is looked up in
the vocabulary; other models get no cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# The expressions of Llama 3 and Qwen, by which a pre-tokenizer cuts texts; GPT-2's is the library's own.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERNS = frozenset(_SPLIT.replace("DIGITS", digits) for digits in (r"\p{N}{1,3}", r"\p{N}"))

_SP_SPACE = " \u2581"  # a space is U+2581 to SentencePiece
_SP_SIGNS = r"!-/:-@\[-`{-~\x00-\x09\x0b-\x1f\x7f"  # and controls of ASCII, without the line end
_SP_OTHER = "\x80-\u2580\u2582-\U0010ffff"
_SP_WORDS = re.compile(  # where other characters than ASCII are near, a word goes on to the next space
    f"[{_SP_SPACE}]*(?:[A-Za-z]+(?![A-Za-z{_SP_OTHER}])|[{_SP_SIGNS}]+(?![{_SP_SIGNS}{_SP_OTHER}])|[0-9](?![{_SP_OTHER}])"
    f"|[^{_SP_SPACE}\n]+)|\n|[{_SP_SPACE}]+"
)
_SP_JOINED = {  # kinds of characters that may be next to each other in a piece
    *("  ", " a", " !", " 0", " é"),
    *("aa", "!!", "éé", "éa", "aé", "é!", "!é", "é0", "0é"),
}
_FEW_SPACES = 16  # characters for each space; in texts with fewer spaces words hardly repeat

_CACHED_PRETOKENS, _CACHED_CHARACTERS = 1 << 18, 1 << 23  # per process, some 60 MB

Ids = npt.NDArray[np.integer[Any]]


class SentencePieceCache:
    """Encodes texts by the words of a SentencePiece BPE, whose ids are in a table that is emptied when it is full.

    SentencePiece puts a space before every text. A word is encoded behind a line end, where it does not.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._ids_of_line_end = len(processor.encode("\n"))
        self._table: dict[str, bytes] = {}  # of the ids of words, int32
        self._characters = 0  # of all words in the table

    @classmethod
    def from_processor(cls, processor: Any) -> SentencePieceCache | None:
        """Makes the cache of a SentencePieceProcessor, or returns None if texts cannot be encoded by their words."""
        trainer, normalizer = _model_specs(processor.serialized_model_proto())
        is_bpe = trainer.get(3) == 2 and trainer.get(35) == 1 and not trainer.get(24)  # bytes for unknown characters
        is_plain = not normalizer.get(2) and normalizer.get(3, 1) and not normalizer.get(4, 1) and normalizer.get(5, 1)
        if not (is_bpe and is_plain):
            return None
        for i in range(processor.get_piece_size()):
            if not (processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i)):
                kinds = "".join(map(_kind, processor.id_to_piece(i)))
                if any(kinds[at : at + 2] not in _SP_JOINED for at in range(len(kinds) - 1)):
                    return None
        return cls(processor)

    def __len__(self) -> int:
        return len(self._table)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts: for each an array [T], int32; may be read-only."""
        is_whole = [not text or text.count(" ") * _FEW_SPACES < len(text) for text in texts]
        by_library = self._encode_with_library([text for text, whole in zip(texts, is_whole, strict=True) if whole])
        cut = [_SP_WORDS.findall(f" {text}") for text, whole in zip(texts, is_whole, strict=True) if not whole]
        try:
            by_words = self._look_up(cut)
        except KeyError:  # rare once the table is filled, so words are not looked up twice to find out
            self._fill({word for words in cut for word in words})
            by_words = self._look_up(cut)
        whole_texts, cut_texts = iter(by_library), iter(by_words)
        return [next(whole_texts if whole else cut_texts) for whole in is_whole]

    def _look_up(self, cut: list[list[str]]) -> list[Ids]:
        table = self._table
        return [np.frombuffer(b"".join([table[word] for word in words]), np.int32) for words in cut]

    def _fill(self, words: set[str]) -> None:
        if len(self._table) > _CACHED_PRETOKENS or self._characters > _CACHED_CHARACTERS:
            self._table.clear()
            self._characters = 0
        missing = [word for word in words if word not in self._table]
        self._characters += sum(map(len, missing))
        for word, ids in zip(missing, self._encode_with_library([f"\n{word}" for word in missing]), strict=True):
            self._table[word] = ids[self._ids_of_line_end :].astype(np.int32, copy=False).tobytes()

    def _encode_with_library(self, texts: list[str]) -> list[Ids]:
        return self._processor.encode(texts, num_threads=1, out_type="numpy")


def encodes_words_alone(state: dict[str, Any]) -> bool:
    """Whether a tokenizer encodes every text by its pre-tokens, which end before a space that letters follow.

    Args:
        state: the content of its tokenizer.json.
    """
    pre_tokenizer, model = state["pre_tokenizer"] or {}, state["model"]
    byte_level, is_known = pre_tokenizer, True
    if pre_tokenizer.get("type") == "Sequence" and len(pre_tokenizer["pretokenizers"]) == 2:
        split, byte_level = pre_tokenizer["pretokenizers"]
        is_known = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        is_known = is_known and split["pattern"].get("Regex") in SPLIT_PATTERNS
    is_known = is_known and byte_level.get("type") == "ByteLevel" and not byte_level.get("add_prefix_space", True)
    is_known = is_known and byte_level.get("use_regex", True) is (byte_level is pre_tokenizer)
    is_plain = model["type"] == "BPE" and not model.get("dropout") and state["normalizer"] in (None, {"type": "NFC"})
    # Special tokens are not looked for in texts, others are, before the pre-tokenizer cuts.
    return is_known and is_plain and all(token["special"] for token in state["added_tokens"])


def _kind(character: str) -> str:
    """A character that stands for the kind of ``character`` in ``_SP_JOINED``."""
    if character in _SP_SPACE:
        return " "
    if not character.isascii():
        return "é"
    if character == "\n":
        return character
    return "a" if character.isalpha() else "0" if character.isdigit() else "!"


def _model_specs(model: bytes) -> tuple[dict[int, Any], dict[int, Any]]:
    """Fields of the specifications of trainer (2) and normalizer (3) in a serialized ModelProto, by number."""
    found = dict(model_fields(model))
    return dict(model_fields(found.get(2, b""))), dict(model_fields(found.get(3, b"")))


def model_fields(message: bytes) -> Iterator[tuple[int, Any]]:
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
