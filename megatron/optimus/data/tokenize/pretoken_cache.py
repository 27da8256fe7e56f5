"""Ids of texts from a table: texts are cut where no token can cross, and the pieces, most of which repeat, looked up.

A byte-level BPE works on the pieces that a regular expression, its pre-tokenizer, cuts a text into. It is matched from
left to right and never looks back, so the ids of a text are those of two halves of it, one after the other, wherever
(1) every match that reaches the place must end there, whatever came before, and (2) nothing that decides about a match
before the place looks beyond it. We cut at places where both follow from the two or three characters around, and
give the pieces themselves to the library. Pieces are ASCII at their ends, where the expressions agree about letters,
digits and spaces with Python; around other characters, whose kind depends on a Unicode version, a piece goes on.

WORDS, for GPT-2's expression: it matches runs of letters, of digits or of other signs, each with one space before it if
there is one, spaces (all but the last before a word), and "'s" and its like. Cuts are where ASCII letters, digits or
signs meet another of these kinds, where space follows something else, and where its rule for spaces says so; around
apostrophes a piece goes on to the next space.

STRETCHES, for the expressions of Llama 3 and Qwen (``SPLIT_PATTERNS``): there one sign or space may precede letters,
line ends may follow signs, and spaces before a line end belong to it. No match goes on

- from a visible character to a space, from a letter or digit to a sign or line end ("'s" begins with its sign), from a
  letter or sign to a digit or back from a digit to a letter,
- from two signs, or a space and a sign, to a letter: runs of signs are one match, and only a single sign is taken by
  the letters after it,
- to the last space before a visible character from a space or tab (``\\s+(?!\\S)``),
- from a line end to a visible character, or to spaces and tabs before one: ``\\s*[\\r\\n]+`` comes before the other
  rules for spaces and ends with the last line end in reach.

``\\s+(?!\\S)``, the only rule that looks ahead, takes all spaces at the end of a piece, as it takes all but the last in
the text. NFC joins nothing across any of these cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_SIGNS = r"\x00-\x08\x0e-\x1f!-&(-/:-@\[-`{-\x7f"  # of ASCII, without the apostrophe
_OPEN = r"'\x80-\U0010ffff"  # an apostrophe may belong to what follows, a character that is not ASCII to either side
WORDS = re.compile(
    f"[{_SPACE}]+(?=[{_SPACE}][^{_SPACE}])|[{_SPACE}](?<! )(?=[^{_SPACE}])"
    f"| ?[A-Za-z]+(?![A-Za-z{_OPEN}])| ?[0-9]+(?![0-9{_OPEN}])| ?[{_SIGNS}]+(?![{_SIGNS}{_OPEN}])"
    f"|[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+"
)

_MARKS = r"!-/:-@\[-`{-~"  # the visible signs of ASCII
_ENDS = "|".join(  # where a match must end
    [
        r"(?<=[!-~])(?= )",
        rf"(?<=[A-Za-z0-9])(?=[{_MARKS}\n])",
        rf"(?<=[{_MARKS}A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])",
        rf"(?<=[ {_MARKS}][{_MARKS}])(?=[A-Za-z])",
        r"(?<=[ \t])(?= [!-~])",
        r"(?<=\n)(?=[ \t]*[!-~])",
    ]
)
STRETCHES = re.compile(  # the last alternative would do; those before it are the usual pieces, faster
    rf" ?[A-Za-z]+(?=[ {_MARKS}0-9\n])|[{_MARKS}][A-Za-z]+(?=[ {_MARKS}0-9\n])|[ \t]+(?= [!-~])"
    rf"| [{_MARKS}]+(?=[ A-Za-z0-9])|[{_MARKS}]{{2,}}(?=[ A-Za-z0-9])|[{_MARKS}](?=[ 0-9])"
    rf"| ?[0-9]+(?=[ {_MARKS}A-Za-z\n])|[{_MARKS}]*\n(?=[ \t]*[!-~])"
    rf"|(?s:.+?)(?:{_ENDS}|\Z)"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERNS = frozenset(_SPLIT.replace("DIGITS", digits) for digits in (r"\p{N}{1,3}", r"\p{N}"))
_BECOME_ASCII = frozenset(";`K")  # what NFC makes of characters beyond ASCII (U+037E, U+1FEF, U+212A)
_CACHED_WORDS = 1 << 18  # per process, some 50 MB

Encode = Callable[[list[str]], list[list[int]]]


class WordTable:
    """``encode`` of texts by their pieces. Texts that contain one of ``apart`` are given to ``encode`` whole."""

    def __init__(self, cut: re.Pattern[str], encode: Encode, apart: tuple[str, ...] = ()) -> None:
        self._cut, self._encode, self._apart = cut, encode, apart
        self._table: dict[str, list[int]] = {}

    @classmethod
    def of_state(cls, state: dict[str, Any], encode: Encode) -> WordTable | None:
        """For a tokenizer of the ``tokenizers`` library; None if ids are not known to be those of pieces."""
        cut, model, normalizer = _cut_of(state["pre_tokenizer"] or {}), state["model"], state["normalizer"]
        if cut is None or model["type"] != "BPE" or model.get("dropout") or normalizer not in (None, {"type": "NFC"}):
            return None
        # Others than special ones, which no text has, are looked for before the text is cut.
        added = [token for token in state["added_tokens"] if not token["special"]]
        for token in added:
            if token["normalized"] and normalizer and not _stays(token["content"]):
                return None
        return cls(cut, encode, tuple(token["content"] for token in added))

    @property
    def is_for_all_texts(self) -> bool:
        return not self._apart

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of the texts, faster."""
        if not self._apart:
            return self._encode_pieces(texts)
        whole = [any(content in text for content in self._apart) for text in texts]
        pieces = iter(self._encode_pieces([text for text, is_whole in zip(texts, whole, strict=True) if not is_whole]))
        others = iter(self._encode([text for text, is_whole in zip(texts, whole, strict=True) if is_whole]))
        return [next(others if is_whole else pieces) for is_whole in whole]

    def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        cut = [self._cut.findall(text) for text in texts]
        try:
            return self._look_up(cut)
        except KeyError:  # rare once the table is filled, so words are not looked up twice to find out
            self._fill({word for words in cut for word in words})
            return self._look_up(cut)

    def _look_up(self, cut: list[list[str]]) -> list[list[int]]:
        table = self._table
        return [list(chain.from_iterable([table[word] for word in words])) for words in cut]

    def _fill(self, words: set[str]) -> None:
        if len(self._table) > _CACHED_WORDS:
            self._table.clear()
        missing = [word for word in words if word not in self._table]
        self._table.update(zip(missing, self._encode(missing), strict=True))


def _cut_of(first: dict[str, Any]) -> re.Pattern[str] | None:
    """How to cut for a pre-tokenizer."""
    if first.get("type") == "Sequence" and len(first["pretokenizers"]) == 2:
        split, first = first["pretokenizers"]
        is_known = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        is_known = is_known and split["pattern"].get("Regex") in SPLIT_PATTERNS
        cut, uses_own = STRETCHES if is_known else None, False
    else:
        cut, uses_own = WORDS, True
    is_bytes = first.get("type") == "ByteLevel" and not first.get("add_prefix_space", True)
    return cut if is_bytes and first.get("use_regex", True) is uses_own else None


def _stays(content: str) -> bool:
    """Whether NFC finds ``content`` in a text only where it was before."""
    return content.isascii() and not _BECOME_ASCII & set(content)
