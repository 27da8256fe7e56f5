"""Cutting the tokens of a document at two of its characters without tokenizing it again.

Where a token that begins with a space and an ASCII letter follows one that ends with an ASCII letter, a pre-tokenizer
of words.py ends a match and begins the next, whatever is around: what is encoded on one side does not depend on the
other. So a document falls into stretches, of some words as a rule, and only those that a cut falls into are encoded
again; also the first and the last, since a sample may begin and end inside of a word. All other tokens stay, being what
the encoding of their text would give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
EncodeBatch = Callable[[list[str]], list[npt.NDArray[np.integer]]]

_WORD = re.compile(rb" [A-Za-z]")
_BEGINS_CHARACTER = re.compile(rb"[^\x80-\xbf]")


class LocalCuts:
    """Of a tokenizer whose tokens stand for ``piece_bytes`` and which encodes pieces of words.py by themselves."""

    def __init__(self, piece_bytes: Mapping[int, bytes], encode_batch: EncodeBatch) -> None:
        self._bytes = [piece_bytes.get(i, b"") for i in range(max(piece_bytes) + 1)]
        self._encode_batch = encode_batch
        # without text; or perhaps a part of U+FFFD, which stands for what is no text
        self._is_odd = np.array([not token or b"\xef" in token for token in self._bytes])
        self._characters = np.array([len(_BEGINS_CHARACTER.findall(token)) for token in self._bytes])
        self._begins_word = np.array([_WORD.match(token) is not None for token in self._bytes])
        self._ends_in_letter = np.array([token[-1:].isalpha() for token in self._bytes])

    def cut(self, ids: Ids, first: float, second: float) -> list[Ids] | None:
        """The encodings of three parts of the text of ``ids`` [T], int64; ``first`` <= ``second`` are shares of it.

        None if the tokens are no whole text, or one that encoding and decoding change.
        """
        if not ids.size or ids.min() < 0 or ids.max() >= len(self._bytes) or self._is_odd[ids].any():
            return None
        ends = np.cumsum(self._characters[ids])
        words = np.flatnonzero(self._begins_word[ids[1:]] & self._ends_in_letter[ids[:-1]]) + 1
        bounds = [0, *words.tolist(), ids.size]  # of stretches, in tokens
        begins = [0, *ends[words - 1].tolist()]  # in characters
        places = [int(share * (int(ends[-1]) + 1)) for share in (first, second)]
        touched = {int(np.searchsorted(begins, place, side="right")) - 1 for place in places}
        parts: list[list[Ids | str]] = [[], [], []]
        done = 0
        for stretch in sorted({0, len(begins) - 1} | touched):
            if done < stretch:
                parts[sum(place <= begins[done] for place in places)].append(ids[bounds[done] : bounds[stretch]])
            try:
                text = self._join(ids[bounds[stretch] : bounds[stretch + 1]]).decode("utf-8")
            except UnicodeDecodeError:
                return None
            a, b = (max(0, place - begins[stretch]) for place in places)
            for part, piece in zip(parts, (text[:a], text[a:b], text[b:]), strict=True):
                if piece:
                    part.append(piece)
            done = stretch + 1
        return self._encode(parts)

    def _encode(self, parts: list[list[Ids | str]]) -> list[Ids] | None:
        """Each part's tokens, its texts encoded; None if a text does not survive that."""
        texts = [piece for part in parts for piece in part if isinstance(piece, str)]
        encoded = self._encode_batch(texts)
        if any(self._join(ids) != text.encode("utf-8") for ids, text in zip(encoded, texts, strict=True)):
            return None
        following = iter(encoded)
        return [
            np.concatenate(
                [np.empty(0, np.int64), *(next(following) if isinstance(piece, str) else piece for piece in part)],
                dtype=np.int64,
            )
            for part in parts
        ]

    def _join(self, ids: npt.NDArray[np.integer]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids.tolist()))
