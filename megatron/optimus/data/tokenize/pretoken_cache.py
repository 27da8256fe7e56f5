"""Pretoken caches: encode texts by looking up the ids of their words, most of which repeat.

A text is cut where no token can cross, and the ids of each piece, a *pre-token*, come from a table; the library encodes
the pre-tokens that are not in it. The ids are those that the library gives for the whole text.

Byte-level BPE (``ByteLevelBPECache``): the library itself cuts a text by a regular expression, its pre-tokenizer. That
is matched from left to right and never looks back, so the ids of a text are those of two halves of it, one after the
other, wherever (1) every match that reaches the cut must end there, whatever came before, and (2) nothing that decides
about a match before the cut looks beyond it. Texts are cut where both follow from the two or three characters around.
Cuts lie between ASCII characters, where the expressions agree with Python about letters, digits and spaces; around
other characters, whose kind depends on a Unicode version, a pre-token goes on.

``WORDS`` serves GPT-2's expression: it matches runs of letters, of digits or of other signs, each with one space before
it if there is one, spaces (all but the last before a word), and "'s" and its like. Cuts are where ASCII letters, digits
or signs meet another of these kinds, where space follows something else, and where its rule for spaces says so; around
apostrophes a pre-token goes on to the next space.

``SEGMENTS`` serves the expressions of Llama 3 and Qwen (``SPLIT_PATTERNS``): there one sign or space may precede
letters, line ends may follow signs, and spaces before a line end belong to it. No match goes on

- from a visible character to a space, from a letter or digit to a sign or line end ("'s" begins with its sign), from a
  letter or sign to a digit or back from a digit to a letter,
- from two signs, or a space and a sign, to a letter: runs of signs are one match, and only a single sign is taken by
  the letters after it,
- to the last space before a visible character from a space or tab (``\\s+(?!\\S)``),
- from a line end to a visible character, or to spaces and tabs before one: ``\\s*[\\r\\n]+`` comes before the other
  rules for spaces and ends with the last line end in reach.

``\\s+(?!\\S)``, the only rule that looks ahead, takes all spaces at the end of a pre-token, as it takes all but the
last in the text. NFC joins nothing across any of these cuts.

SentencePiece BPE (``SentencePieceCache``): this BPE has no pre-tokenizer; it merges neighbours anywhere in a text, best
pieces first. But it only ever makes pieces of its vocabulary, so between two characters that no piece has next to each
other nothing is merged, and what is merged on one side does not depend on the other. Trainers keep scripts apart,
digits by themselves and spaces in front; so in most vocabularies letters, signs and line ends have no piece in common,
and only a space is joined to the space before it. Whether that holds is looked up in the vocabulary; other models get
no cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SIGNS = r"\x00-\x08\x0e-\x1f!-&(-/:-@\[-`{-\x7f"  # of ASCII, without the apostrophe
_OPEN = r"'\x80-\U0010ffff"  # an apostrophe may belong to what follows, a character that is not ASCII to either side
WORDS = re.compile(
    f"[{_SPACE}]+(?=[{_SPACE}][^{_SPACE}])|[{_SPACE}](?<! )(?=[^{_SPACE}])"
    f"| ?[A-Za-z]+(?![A-Za-z{_OPEN}])| ?[0-9]+(?![0-9{_OPEN}])| ?[{_SIGNS}]+(?![{_SIGNS}{_OPEN}])"
    f"|[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+"
)

_MARKS = r"!-/:-@\[-`{-~"  # the visible signs of ASCII
_MATCH_ENDS = "|".join(  # where a match must end
    [
        r"(?<=[!-~])(?= )",
        rf"(?<=[A-Za-z0-9])(?=[{_MARKS}\n])",
        rf"(?<=[{_MARKS}A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])",
        rf"(?<=[ {_MARKS}][{_MARKS}])(?=[A-Za-z])",
        r"(?<=[ \t])(?= [!-~])",
        r"(?<=\n)(?=[ \t]*[!-~])",
    ]
)
SEGMENTS = re.compile(  # the last alternative would do; those before it are the usual pre-tokens, faster
    rf" ?[A-Za-z]+(?=[ {_MARKS}0-9\n])|[{_MARKS}][A-Za-z]+(?=[ {_MARKS}0-9\n])|[ \t]+(?= [!-~])"
    rf"| [{_MARKS}]+(?=[ A-Za-z0-9])|[{_MARKS}]{{2,}}(?=[ A-Za-z0-9])|[{_MARKS}](?=[ 0-9])"
    rf"| ?[0-9]+(?=[ {_MARKS}A-Za-z\n])|[{_MARKS}]*\n(?=[ \t]*[!-~])"
    rf"|(?s:.+?)(?:{_MATCH_ENDS}|\Z)"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERNS = frozenset(_SPLIT.replace("DIGITS", digits) for digits in (r"\p{N}{1,3}", r"\p{N}"))
_BECOME_ASCII = frozenset(";`K")  # what NFC makes of characters beyond ASCII (U+037E, U+1FEF, U+212A)

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


class PretokenCache:
    """A table of the ids of pre-tokens, which is emptied when it is full.

    Args:
        pattern: cuts a text into its pre-tokens
        encode: encodes pre-tokens that are not in the table: for each its ids, an array of ``dtype``
        dtype: integer type of ids
    """

    def __init__(
        self, pattern: re.Pattern[str], encode: Callable[[list[str]], list[Ids]], dtype: type[np.integer[Any]]
    ) -> None:
        self._pattern, self._encode, self._dtype = pattern, encode, dtype
        self._table: dict[str, bytes] = {}  # of their ids
        self._characters = 0  # of all pre-tokens in the table

    def __len__(self) -> int:
        return len(self._table)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts: for each an array [T] of ``dtype``, read-only."""
        cut = [self._pattern.findall(text) for text in texts]
        try:
            return self._look_up(cut)
        except KeyError:  # rare once the table is filled, so pre-tokens are not looked up twice to find out
            self._fill({pretoken for pretokens in cut for pretoken in pretokens})
            return self._look_up(cut)

    def _look_up(self, cut: list[list[str]]) -> list[Ids]:
        table, dtype = self._table, self._dtype
        return [np.frombuffer(b"".join([table[pretoken] for pretoken in pretokens]), dtype) for pretokens in cut]

    def _fill(self, pretokens: set[str]) -> None:
        if len(self._table) > _CACHED_PRETOKENS or self._characters > _CACHED_CHARACTERS:
            self._table.clear()
            self._characters = 0
        missing = [pretoken for pretoken in pretokens if pretoken not in self._table]
        self._characters += sum(map(len, missing))
        for pretoken, ids in zip(missing, self._encode(missing), strict=True):
            self._table[pretoken] = ids.astype(self._dtype, copy=False).tobytes()


class ByteLevelBPECache:
    """Encodes texts by the pre-tokens of a byte-level BPE of the ``tokenizers`` library.

    Args:
        pattern: cuts a text where the tokenizer's own pre-tokenizer must
        encode: encodes texts by the library: for each an array of its ids
        added_tokens: texts that contain one of these are encoded whole, as the library looks for them before it cuts
    """

    def __init__(
        self, pattern: re.Pattern[str], encode: Callable[[list[str]], list[Ids]], added_tokens: tuple[str, ...] = ()
    ) -> None:
        self._pretokens = PretokenCache(pattern, encode, np.uint32)
        self._encode, self._added_tokens = encode, added_tokens

    @classmethod
    def from_state(cls, state: dict[str, Any], encode: Callable[[list[str]], list[Ids]]) -> ByteLevelBPECache | None:
        """Makes the cache of a tokenizer, or returns None if texts cannot be encoded by their pre-tokens.

        Args:
            state: contents of its tokenizer.json
            encode: encodes texts by the library
        """
        pattern, model, normalizer = _pattern_for(state["pre_tokenizer"] or {}), state["model"], state["normalizer"]
        if pattern is None or model["type"] != "BPE" or model.get("dropout"):
            return None
        if normalizer not in (None, {"type": "NFC"}):
            return None
        # special tokens are not looked for in texts
        added = [token for token in state["added_tokens"] if not token["special"]]
        for token in added:
            if token["normalized"] and normalizer and not _is_kept_by_nfc(token["content"]):
                return None
        return cls(pattern, encode, tuple(token["content"] for token in added))

    @property
    def is_for_all_texts(self) -> bool:
        """True if every text is encoded by its pre-tokens."""
        return not self._added_tokens

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts: for each an array [T], uint32, read-only."""
        if not self._added_tokens:
            return self._pretokens.encode_batch(texts)
        is_whole = [any(content in text for content in self._added_tokens) for text in texts]
        return _encode_each(texts, is_whole, self._encode, self._pretokens.encode_batch)


class SentencePieceCache:
    """Encodes texts by the words of a SentencePiece BPE.

    SentencePiece puts a space before every text. A word is encoded behind a line end, where it does not.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._words = PretokenCache(_SP_WORDS, self._encode_words, np.int32)
        self._ids_of_line_end = len(processor.encode("\n"))

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
        return len(self._words)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Encodes texts: for each an array [T], int32; may be read-only."""
        is_whole = [not text or text.count(" ") * _FEW_SPACES < len(text) for text in texts]
        return _encode_each(
            texts,
            is_whole,
            self._encode_with_library,
            lambda own: self._words.encode_batch([f" {text}" for text in own]),
        )

    def _encode_with_library(self, texts: list[str]) -> list[Ids]:
        return self._processor.encode(texts, num_threads=1, out_type="numpy")

    def _encode_words(self, words: list[str]) -> list[Ids]:
        return [ids[self._ids_of_line_end :] for ids in self._encode_with_library([f"\n{word}" for word in words])]


def _encode_each(
    texts: list[str],
    is_whole: list[bool],
    encode_whole: Callable[[list[str]], list[Ids]],
    encode_cut: Callable[[list[str]], list[Ids]],
) -> list[Ids]:
    """Encodes each text by one of two functions, in their order."""
    cut = iter(encode_cut([text for text, whole in zip(texts, is_whole, strict=True) if not whole]))
    others = iter(encode_whole([text for text, whole in zip(texts, is_whole, strict=True) if whole]))
    return [next(others if whole else cut) for whole in is_whole]


def _pattern_for(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The expression that cuts texts for a pre-tokenizer; None for an unknown one."""
    byte_level = pre_tokenizer
    if pre_tokenizer.get("type") == "Sequence" and len(pre_tokenizer["pretokenizers"]) == 2:
        split, byte_level = pre_tokenizer["pretokenizers"]
        is_known = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        is_known = is_known and split["pattern"].get("Regex") in SPLIT_PATTERNS
        pattern, uses_own = SEGMENTS if is_known else None, False
    else:
        pattern, uses_own = WORDS, True
    is_byte_level = byte_level.get("type") == "ByteLevel" and not byte_level.get("add_prefix_space", True)
    return pattern if is_byte_level and byte_level.get("use_regex", True) is uses_own else None


def _is_kept_by_nfc(content: str) -> bool:
    """Whether NFC finds ``content`` in a text only where it was before."""
    return content.isascii() and not _BECOME_ASCII & set(content)


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
