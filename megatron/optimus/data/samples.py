"""From the tokens of an instance to what the model gets: labels, positions that count, and where documents begin.

Documents are told by the end-of-document token, as Megatron does: the token after it begins the next one. That costs a
look at tokens that are in memory anyway; the index would cost a search on disk for every sample. So the options need a
tokenizer, and corpora that were tokenized with --append-eod (``dataset.check_contents`` looks at the end of each).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.layers import NO_LABEL

Ids = npt.NDArray[np.int64]
Change = Callable[[Ids], Ids]  # the tokens of a piece, in and out


class Piece(NamedTuple):
    """Tokens that follow each other in a corpus."""

    tokens: Ids
    following: int  # the token after them; NO_LABEL where a document ends with them


class Sample(NamedTuple):
    """One row of a batch."""

    tokens_S: Ids
    labels_S: Ids  # the token to predict at each position, or NO_LABEL
    starts: list[int]  # positions above 0 at which a document, or padding, begins


@dataclass(frozen=True)
class SampleOptions:
    """Megatron's options of these names; all of them need ``eod_id``, the token that ends a document."""

    eod_id: int | None = None
    reset_attention_mask: bool = False  # attention inside documents only
    reset_position_ids: bool = False  # positions count from each document's beginning
    eod_mask_loss: bool = False  # after the end of a document nothing is predicted


def make_sample(pieces: list[Piece], length: int, options: SampleOptions, change: Change | None = None) -> Sample:
    """The sample of ``length`` positions that pieces make up, one after the other; what they leave is padding.

    ``change`` may make pieces longer; what then lies beyond ``length`` is lost.
    """
    if change is not None:
        pieces = [_changed(piece, change(piece.tokens)) for piece in pieces]
    tokens = np.concatenate([np.empty(0, np.int64), *(piece.tokens for piece in pieces)])
    labels = np.append(tokens[1:], NO_LABEL)[: tokens.size]
    ends = list(itertools.accumulate(piece.tokens.size for piece in pieces))
    labels[[end - 1 for end in ends]] = [piece.following for piece in pieces]
    starts = set(ends)
    if options.eod_id is not None:
        at_end = np.flatnonzero(tokens == options.eod_id)
        starts.update((at_end + 1).tolist())
        if options.eod_mask_loss:
            labels[at_end] = NO_LABEL
    missing = max(0, length - tokens.size)
    tokens = np.append(tokens, np.full(missing, options.eod_id or 0))[:length]
    labels = np.append(labels, np.full(missing, NO_LABEL))[:length]
    return Sample(tokens, labels, sorted(start for start in starts if start < length))


def _changed(piece: Piece, tokens: Ids) -> Piece:
    """The token that followed a piece no longer does when its last document has been put in another order."""
    return piece if np.array_equal(tokens, piece.tokens) else Piece(tokens, NO_LABEL)


def positions(starts: list[int], length: int) -> Ids:
    """Of each token in its document: int64 [length]."""
    first = np.zeros(length, dtype=np.int64)
    first[starts] = starts
    return np.arange(length) - np.maximum.accumulate(first)
