"""From the tokens of an instance to what the model gets: labels, positions that count, and where documents begin.

Documents are told by the end-of-document token, as Megatron does: the token after it begins the next one. That costs a
look at tokens that are in memory anyway; the index would cost a search on disk for every sample. So the options need a
tokenizer, and corpora that were tokenized with --append-eod (``dataset.check_vocabulary`` looks at the end of each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.layers.loss import NO_LABEL

Ids = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One row of a batch."""

    tokens_S: Ids
    labels_S: Ids  # the token to predict at each position, or NO_LABEL
    starts: list[int]  # positions at which documents begin; empty where nobody asked


@dataclass(frozen=True)
class SampleOptions:
    """Megatron's options of these names; all of them need ``eod_id``, the token that ends a document."""

    eod_id: int | None = None
    reset_attention_mask: bool = False  # attention inside documents only
    reset_position_ids: bool = False  # positions count from each document's beginning
    eod_mask_loss: bool = False  # after the end of a document nothing is predicted

    @property
    def needs_starts(self) -> bool:
        return self.reset_attention_mask or self.reset_position_ids


def make_sample(window: Ids, options: SampleOptions) -> Sample:
    """The sample of a window of S + 1 tokens."""
    tokens, labels, starts = window[:-1], window[1:], []
    if options.needs_starts:
        starts = (np.flatnonzero(tokens[:-1] == options.eod_id) + 1).tolist()
    if options.eod_mask_loss:
        labels = np.where(tokens == options.eod_id, NO_LABEL, labels)
    return Sample(tokens, labels, starts)


def positions(starts: list[int], length: int) -> Ids:
    """Of each token in its document: int64 [length]."""
    first = np.zeros(length, dtype=np.int64)
    first[starts] = starts
    return np.arange(length) - np.maximum.accumulate(first)
