"""Fill in the middle (arXiv 2207.14255): some documents are cut in three, and their middle is put last.

With the sentinels <PRE>, <SUF> and <MID> a document ``prefix middle suffix`` becomes

    PSM  <PRE> prefix <SUF> suffix <MID> middle
    SPM  <PRE> <SUF> suffix <MID> prefix middle

The document is cut at two characters, chosen uniformly, and its three texts are tokenized again: a model that completes
code meets a prefix that ends in the middle of a word, as a user leaves it. Where a text does not survive that (a
document that begins with part of a character; a tokenizer that adds a space in front), it is cut between tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron.optimus.data.dataset import Ids
from megatron.optimus.data.tokenize.tokenizer import Tokenizer

_WORD_START = re.compile(rb" [A-Za-z]")
_CHARACTER_START = re.compile(rb"[^\x80-\xbf]")  # of UTF-8


@dataclass(frozen=True)
class FillInTheMiddle:
    """Reorders documents for fill in the middle."""

    rate: float  # share of documents that are reordered
    spm_rate: float  # share of these that become SPM; the others become PSM
    sentinels: tuple[int, int, int]  # ids of <PRE>, <MID>, <SUF>
    tokenizer: Tokenizer

    def apply(self, tokens: Ids, uniform: Iterator[float]) -> Ids:
        """Reorders some of the documents among the tokens.

        Args:
            tokens: [T]
            uniform: random numbers in [0, 1), four of which are taken for every document

        Returns:
            The new tokens, never fewer than before.
        """
        ends = np.flatnonzero(tokens == self.tokenizer.eod_id) + 1
        documents = np.split(tokens, ends[ends < tokens.size])
        return np.concatenate([self._document(document, [next(uniform) for _ in range(4)]) for document in documents])

    def _document(self, tokens: Ids, uniform: list[float]) -> Ids:
        is_reordered, is_spm, *cuts = uniform
        size = tokens.size - (tokens[-1] == self.tokenizer.eod_id)
        if is_reordered >= self.rate or not size:
            return tokens
        prefix, middle, suffix = self._split(tokens[:size], *sorted(cuts))
        pre, mid, suf = ([i] for i in self.sentinels)
        if is_spm < self.spm_rate:
            reordered = np.concatenate((pre, suf, suffix, mid, prefix, middle))
        else:
            reordered = np.concatenate((pre, prefix, suf, suffix, mid, middle))
        if reordered.size <= size:  # tokens that no encoding gives: their text could be encoded in fewer
            return tokens
        return np.concatenate((reordered, tokens[size:]))

    @cached_property
    def _splitter(self) -> TokenSplitter | None:
        token_bytes = self.tokenizer.token_bytes
        return None if token_bytes is None else TokenSplitter(token_bytes, self.tokenizer.encode_batch)

    def _split(self, ids: Ids, first: float, second: float) -> list[Ids]:
        """Cuts a document's tokens at two fractions of its length, ``first`` <= ``second``."""
        if self._splitter is not None and (found := self._splitter.split(ids, first, second)) is not None:
            return found
        text = self.tokenizer.decode(ids.tolist())
        a, b = (int(fraction * (len(text) + 1)) for fraction in (first, second))
        encoded = [own.astype(np.int64) for own in self.tokenizer.encode_batch([text[:a], text[a:b], text[b:]])]
        if "\ufffd" not in text and self.tokenizer.decode(np.concatenate(encoded).tolist()) == text:
            return encoded
        a, b = (int(fraction * (ids.size + 1)) for fraction in (first, second))
        return [ids[:a], ids[a:b], ids[b:]]


class TokenSplitter:
    """Cuts the tokens of a text at two of its characters and encodes only the words near the cuts again.

    Where a token that begins with a space and an ASCII letter follows one that ends with an ASCII letter, a tokenizer
    that ``encodes_words_alone`` ends a match and begins the next, whatever is around: what is encoded on one side does
    not depend on the other. Between such boundaries a text falls into segments, of a few words as a rule.
    Encoded again are the segments that hold a cut, and the first and the last, since a sample may begin and end inside
    of a word. All other tokens are what the encoding of their text would give, and stay.

    Args:
        token_bytes: bytes that each id stands for; ids must be those of pre-tokens encoded one by one
        encode_batch: encodes texts
    """

    def __init__(
        self,
        token_bytes: Mapping[int, bytes],
        encode_batch: Callable[[list[str]], list[npt.NDArray[np.integer]]],
    ) -> None:
        self._bytes = [token_bytes.get(i, b"") for i in range(max(token_bytes) + 1)]
        self._encode_batch = encode_batch
        # without text; or perhaps a part of U+FFFD, which stands for what is no text
        self._is_odd = np.array([not token or b"\xef" in token for token in self._bytes])
        self._characters = np.array([len(_CHARACTER_START.findall(token)) for token in self._bytes])
        self._begins_word = np.array([_WORD_START.match(token) is not None for token in self._bytes])
        self._ends_in_letter = np.array([token[-1:].isalpha() for token in self._bytes])

    def split(self, ids: Ids, first: float, second: float) -> list[Ids] | None:
        """Splits tokens into the encodings of the three parts of their text.

        Args:
            ids: [T], int64
            first: fraction of the text, in characters, at which it is cut
            second: the same of the second cut; at least ``first``

        Returns:
            Three arrays of ids; None if the tokens are no whole text, or one that encoding and decoding change.
        """
        if not ids.size or ids.min() < 0 or ids.max() >= len(self._bytes) or self._is_odd[ids].any():
            return None
        ends = np.cumsum(self._characters[ids])
        boundaries = np.flatnonzero(self._begins_word[ids[1:]] & self._ends_in_letter[ids[:-1]]) + 1
        tokens_at = [0, *boundaries.tolist(), ids.size]  # segment -> its first token
        characters_at = [0, *ends[boundaries - 1].tolist()]  # segment -> its first character
        cuts = [int(fraction * (int(ends[-1]) + 1)) for fraction in (first, second)]
        with_cut = {int(np.searchsorted(characters_at, cut, side="right")) - 1 for cut in cuts}
        thirds: list[list[Ids | str]] = [[], [], []]  # tokens that stay, and texts to encode
        done = 0
        for segment in sorted({0, len(characters_at) - 1} | with_cut):
            if done < segment:
                third = sum(cut <= characters_at[done] for cut in cuts)
                thirds[third].append(ids[tokens_at[done] : tokens_at[segment]])
            try:
                text = self._join(ids[tokens_at[segment] : tokens_at[segment + 1]]).decode("utf-8")
            except UnicodeDecodeError:
                return None
            a, b = (max(0, cut - characters_at[segment]) for cut in cuts)
            for third_of_text, own in zip(thirds, (text[:a], text[a:b], text[b:]), strict=True):
                if own:
                    third_of_text.append(own)
            done = segment + 1
        return self._encode(thirds)

    def _encode(self, thirds: list[list[Ids | str]]) -> list[Ids] | None:
        """Each third's tokens, its texts encoded; None if decoding does not give such a text again."""
        texts = [item for third in thirds for item in third if isinstance(item, str)]
        encoded = self._encode_batch(texts)
        if any(self._join(ids) != text.encode("utf-8") for ids, text in zip(encoded, texts, strict=True)):
            return None
        following = iter(encoded)
        return [
            np.concatenate(
                [np.empty(0, np.int64), *(next(following) if isinstance(item, str) else item for item in third)],
                dtype=np.int64,
            )
            for third in thirds
        ]

    def _join(self, ids: npt.NDArray[np.integer]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids.tolist()))
