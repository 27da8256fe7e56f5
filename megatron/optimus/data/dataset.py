"""Training instances: fixed-length windows over token files.

Each file's documents are read as one stream of tokens, as they lie in the .bin file. A split owns a range of that
stream, and within it instance j is tokens [first + j*L, first + j*L + L + 1): L inputs and, one further, L labels. So
neighbouring instances share one token (the last label of one is the first input of the next), every token but the first
of a range is predicted exactly once, and up to L tokens at the end of a range are left over.

The ranges of training, validation and test are shares of the *tokens* of each file and do not touch, hence

- no token of a validation or test instance, the shared one included, occurs in a training instance;
- a run that changes its sequence length keeps its splits.

Instances span neither files nor splits, but they do span documents.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from enum import IntEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.indexed import IndexedDataset


class Split(IntEnum):
    TRAIN = 0
    VALID = 1
    TEST = 2


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """Shares of training, validation and test, adding up to one, from "969,30,1" (missing numbers are 0).

    Exact, so that every rank cuts at the same token. Raises ConfigError.
    """
    try:
        numbers = [Fraction(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if not 1 <= len(numbers) <= 3 or min(numbers) < 0 or not sum(numbers):
        raise ConfigError(f"split={text!r} must be one to three numbers >= 0, not all 0, such as 969,30,1")
    numbers += [Fraction(0)] * (3 - len(numbers))
    total = sum(numbers)
    return numbers[0] / total, numbers[1] / total, numbers[2] / total


def split_range(num_tokens: int, split: str, part: Split) -> tuple[int, int]:
    """The tokens [start, stop) that ``part`` owns of a file with ``num_tokens``."""
    shares = parse_split(split)
    return int(num_tokens * sum(shares[:part])), int(num_tokens * sum(shares[: part + 1]))


class InstanceSet:
    """The instances of one split over one or several .bin/.idx pairs, numbered file after file.

    Args:
        prefixes: paths of the pairs, without suffix
        seq_length: L, labels per instance
        split: shares of training, validation and test, as ``parse_split`` takes them
        part: which of the three this set holds

    Raises DataError if a pair cannot be used or the split holds no instance, ConfigError for impossible options.
    """

    def __init__(
        self, prefixes: Sequence[str], seq_length: int, *, split: str = "1,0,0", part: Split = Split.TRAIN
    ) -> None:
        if not prefixes:
            raise ConfigError("data_path is empty; give the prefix of at least one .bin/.idx pair")
        if seq_length < 1:
            raise ConfigError(f"seq_length={seq_length} must be at least 1")
        if not parse_split(split)[part]:
            raise ConfigError(f"split={split!r} gives the {part.name.lower()} split no share")
        self.seq_length = seq_length
        self._files = [IndexedDataset(prefix) for prefix in prefixes]
        self._starts: list[int] = []  # first token of the split in each file
        counts: list[int] = []
        for file in self._files:
            if file.dtype.kind == "f":
                raise DataError(f"{file.prefix}.idx: dtype code says {file.dtype.name}; token ids must be integers")
            start, stop = split_range(file.tokens_total, split, part)
            self._starts.append(start)
            counts.append(max(0, stop - start - 1) // seq_length)
        self._ends = list(itertools.accumulate(counts))  # instances up to and including each file
        if not self._ends[-1]:
            total = sum(file.tokens_total for file in self._files)
            largest = max(file.tokens_total for file in self._files)
            raise DataError(
                f"{', '.join(prefixes[:4])}{' ...' if len(prefixes) > 4 else ''}: too little data: the "
                f"{part.name.lower()} split ({split}) of {total} tokens in {len(prefixes)} files (the largest has "
                f"{largest}) holds no instance of seq_length+1={seq_length + 1} tokens; add data, shorten seq_length, "
                f"or give that split a larger share"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, i: int) -> tuple[str, int]:
        """(prefix of the file, number of the first token in it) of instance ``i``, in O(log files)."""
        file, start = self._locate(i)
        return self._files[file].prefix, start

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Instance ``i``: int64 [seq_length + 1]. Inputs are all but the last, labels all but the first."""
        file, start = self._locate(i)
        return self._files[file].tokens[start : start + self.seq_length + 1].astype(np.int64)

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"instance {i} of {len(self)}")
        file = bisect.bisect_right(self._ends, i)
        inside = i - (self._ends[file - 1] if file else 0)
        return file, self._starts[file] + inside * self.seq_length


def check_vocabulary(prefixes: Sequence[str], vocab_size: int) -> None:
    """Reads every token of the pairs once; raises DataError at the first id outside [0, vocab_size).

    Meant to be called by one rank before training: an id past the embedding is a crash on some devices and silent noise
    on others. Reads at disk or memory speed (a gigabyte or more a second from the page cache), in constant memory.
    """
    for prefix in prefixes:
        IndexedDataset(prefix).check_token_ids(vocab_size)
