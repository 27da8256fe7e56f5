"""Fill in the middle (arXiv 2207.14255): some documents are cut in three, and the middle part is put last.

With the sentinels <PRE>, <SUF> and <MID> a document ``prefix middle suffix`` becomes

    PSM  <PRE> prefix <SUF> suffix <MID> middle
    SPM  <PRE> <SUF> suffix <MID> prefix middle

Cuts are uniform over the characters of the text, and the three parts are tokenized again: a model that completes code
meets a prefix that ends in the middle of a word, as a user leaves it. Where a text does not survive that (a document
that begins with part of a character; a tokenizer that adds a space in front), cuts lie between tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.optimus.data.samples import Ids
from megatron.optimus.data.tokenize.local_cuts import LocalCuts
from megatron.optimus.data.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInTheMiddle:
    """What is done to documents; ``rate`` of them are changed, ``spm_rate`` of these as SPM, the others as PSM."""

    rate: float
    spm_rate: float
    sentinels: tuple[int, int, int]  # ids of <PRE>, <MID>, <SUF>
    tokenizer: Tokenizer

    def apply(self, tokens: Ids, chance: Iterator[float]) -> Ids:
        """The tokens with each of their documents changed or not, never fewer than before.

        ``chance``: uniform numbers in [0, 1); four are taken for every document.
        """
        ends = np.flatnonzero(tokens == self.tokenizer.eod_id) + 1
        documents = np.split(tokens, ends[ends < tokens.size])
        return np.concatenate([self._document(document, [next(chance) for _ in range(4)]) for document in documents])

    def _document(self, tokens: Ids, chances: list[float]) -> Ids:
        is_changed, is_spm, *cuts = chances
        size = tokens.size - (tokens[-1] == self.tokenizer.eod_id)
        if is_changed >= self.rate or not size:
            return tokens
        prefix, middle, suffix = self._cut(tokens[:size], *sorted(cuts))
        pre, mid, suf = ([i] for i in self.sentinels)
        if is_spm < self.spm_rate:
            changed = np.concatenate((pre, suf, suffix, mid, prefix, middle))
        else:
            changed = np.concatenate((pre, prefix, suf, suffix, mid, middle))
        if changed.size <= size:  # tokens that no encoding gives: three parts of them could come out shorter
            return tokens
        return np.concatenate((changed, tokens[size:]))

    @cached_property
    def _local_cuts(self) -> LocalCuts | None:
        piece_bytes = self.tokenizer.piece_bytes
        return None if piece_bytes is None else LocalCuts(piece_bytes, self.tokenizer.encode_batch)

    def _cut(self, ids: Ids, first: float, second: float) -> list[Ids]:
        """Three parts of a document's tokens; ``first`` <= ``second`` are shares of its length."""
        if self._local_cuts is not None and (cut := self._local_cuts.cut(ids, first, second)) is not None:
            return cut
        text = self.tokenizer.decode(ids.tolist())
        a, b = (int(share * (len(text) + 1)) for share in (first, second))
        parts = [part.astype(np.int64) for part in self.tokenizer.encode_batch([text[:a], text[a:b], text[b:]])]
        if "\ufffd" not in text and self.tokenizer.decode(np.concatenate(parts).tolist()) == text:
            return parts
        a, b = (int(share * (ids.size + 1)) for share in (first, second))
        return [ids[:a], ids[a:b], ids[b:]]
