"""Training instances: fixed-length windows over token files.

Each file's documents are read as one stream of tokens, as they lie in the .bin file. A split owns a range of that
stream, and within it instance j is the L tokens [first + j*L, first + (j + 1)*L). They predict each other: the last
position has no label, one in L is lost, and a training instance whose length is a multiple of a page is read from a
disk without a byte too many. With the extra token (Megatron's way) the token after them is read too, as the last label.
Which instances there are does not depend on that: each is followed by a token of its range, up to L tokens at the end
of a range are left over, and a run may switch at any step without moving a sample.

The ranges of training, validation and test are shares of the *tokens* of each file and do not touch, hence

- no token of a validation or test instance, the shared one included, occurs in a training instance;
- a run that changes its sequence length keeps its splits.

Instances span neither files nor splits, but they do span documents. With packing (packing.py) an instance is made of
whole documents of a window instead; the windows lie in the same ranges.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Sequence
from enum import IntEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, parse_split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.index_reader import check_indices, shares, spread_pieces
from megatron.optimus.data.indexed import DTYPES
from megatron.optimus.data.packing import Range, num_packed, pack, window_of
from megatron.optimus.data.samples import Piece
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform.log import counted

logger = logging.getLogger("optimus")

_CHECK_CHUNK = 1 << 20  # tokens looked at together
_CHECKED_TOKENS = 1 << 26  # tokens a rank looks at before the run: a fraction of a second
_CHECKED_ENTRIES = 1 << 23  # entries of indices likewise, of 20 bytes each: a share of 1/256 of 2 T tokens is whole
_CHECKED_LENGTHS = 1 << 26  # of 4 bytes each, less than a tenth of a second

_Window = tuple[list[list[Range]], set[int]]  # packed sequences, and the tokens at which documents begin


class Split(IntEnum):
    TRAIN = 0
    VALID = 1
    TEST = 2


def split_range(num_tokens: int, split: str, part: Split) -> tuple[int, int]:
    """The tokens [start, stop) that ``part`` owns of a file with ``num_tokens``."""
    before, after = _bounds(split, part)
    return _share(num_tokens, before), _share(num_tokens, after)


def _bounds(split: str, part: Split) -> tuple[Fraction, Fraction]:
    shares = parse_split(split)
    return sum(shares[:part], Fraction(0)), sum(shares[: part + 1], Fraction(0))


def _share(num_tokens: int, share: Fraction) -> int:
    return num_tokens * share.numerator // share.denominator


class InstanceSet:
    """The instances of one split over one or several .bin/.idx pairs, numbered file after file.

    Args:
        prefixes: paths of the pairs, without suffix
        seq_length: L, tokens per instance
        split: shares of training, validation and test, as ``parse_split`` takes them
        part: which of the three this set holds
        files: where to read the pairs, if other sets share the open files
        vocab_size: when given, reading refuses ids outside [0, vocab_size)
        packing: instances of whole documents
        extra_token: read the token after an instance too, as the label of its last position

    Raises DataError if a pair cannot be used or the split holds no instance, ConfigError for impossible options.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        seq_length: int,
        *,
        split: str = "1,0,0",
        part: Split = Split.TRAIN,
        files: TokenFiles | None = None,
        vocab_size: int | None = None,
        packing: bool = False,
        extra_token: bool = False,
    ) -> None:
        if not prefixes:
            raise ConfigError("data_path is empty; give the prefix of at least one .bin/.idx pair")
        if seq_length < 1:
            raise ConfigError(f"seq_length={seq_length} must be at least 1")
        if seq_length == 1 and not extra_token:
            raise ConfigError(
                "seq_length=1 leaves nothing to predict; use at least 2, or --add-extra-token-to-sequence true"
            )
        before, after = _bounds(split, part)
        if before == after:
            raise ConfigError(f"split={split!r} gives the {part.name.lower()} split no share")
        self.seq_length = seq_length
        self.packing = packing
        self.labels_per_sample = None if packing else seq_length - (not extra_token)  # None: samples differ
        self._extra = int(extra_token)
        self._vocab_size = vocab_size
        self._files = TokenFiles(prefixes) if files is None else files
        self._numbers = np.array([self._files.number[prefix] for prefix in prefixes], dtype=np.int64)
        tokens = self._files.tokens[self._numbers].tolist()
        self.num_tokens = sum(tokens)  # of all splits
        self._starts = [_share(total, before) for total in tokens]  # first token of the split in each file
        self._windows = [  # plain instances of each file
            max(0, _share(total, after) - start - 1) // seq_length
            for total, start in zip(tokens, self._starts, strict=True)
        ]
        counts = [num_packed(n) for n in self._windows] if packing else self._windows
        self._ends = list(itertools.accumulate(counts))  # instances up to and including each file
        self._last_window: tuple[tuple[int, int], _Window] | None = None  # for reading in order
        if not self._ends[-1]:
            raise DataError(
                f"{', '.join(prefixes[:4])}{' ...' if len(prefixes) > 4 else ''}: too little data: the "
                f"{part.name.lower()} split ({split}) of {self.num_tokens} tokens in {counted(len(prefixes), 'file')} "
                f"(the largest has {max(tokens)}) holds no instance of seq_length+1="
                f"{seq_length + 1} tokens; add data, shorten seq_length, or give that split a larger share"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, i: int) -> tuple[str, list[Range]]:
        """(prefix of the file, tokens of it) that instance ``i`` is made of. O(log files); packed, reads the index."""
        file, inside = self._file_of(i)
        return self._files.prefixes[self._numbers[file]], self._ranges(file, inside)[0]

    def read(self, i: int) -> list[Piece]:
        """The pieces of instance ``i``: ``seq_length`` tokens in all, or, packed, at most.

        A piece that ends with its document, or comes without the extra token, has nothing to follow it.

        Raises DataError if the file has changed since the start, or an id lies outside the vocabulary.
        """
        file, inside = self._file_of(i)
        ranges, ends = self._ranges(file, inside)
        number, pieces = int(self._numbers[file]), []
        for (start, stop), ends_document in zip(ranges, ends, strict=True):
            extra = 0 if ends_document else self._extra
            tokens = self._files.read(number, start, stop - start + extra)
            if self._vocab_size is not None:
                _check_ids(self._files.prefixes[number], start, tokens, self._vocab_size)
            tokens = tokens.astype(np.int64)
            pieces.append(Piece(tokens[:-1], int(tokens[-1])) if extra else Piece(tokens, NO_LABEL))
        return pieces

    def _file_of(self, i: int) -> tuple[int, int]:
        """(position of the file in this set, instance within the file)"""
        if not 0 <= i < len(self):
            raise IndexError(f"instance {i} of {len(self)}")
        file = bisect.bisect_right(self._ends, i)
        return file, i - (self._ends[file - 1] if file else 0)

    def _ranges(self, file: int, inside: int) -> tuple[list[Range], list[bool]]:
        """Token ranges of an instance of a file, and whether a document ends with each (packed) or it may go on."""
        if not self.packing:
            start = self._starts[file] + inside * self.seq_length
            return [(start, start + self.seq_length)], [False]
        first, instances, sequences, number = window_of(inside, self._windows[file])
        kept = self._last_window
        if kept is None or kept[0] != (file, first):
            kept = self._last_window = (file, first), self._pack(file, first, instances, sequences)
        packed, document_ends = kept[1]
        return packed[number], [stop in document_ends for _, stop in packed[number]]

    def _pack(self, file: int, first: int, instances: int, sequences: int) -> _Window:
        start = self._starts[file] + first * self.seq_length
        stop = start + instances * self.seq_length
        found = self._files.document_starts(int(self._numbers[file]), start, stop + 1).tolist()
        return pack(sorted({start, stop, *found}), sequences, self.seq_length), set(found)


def _check_ids(prefix: str, start: int, tokens: npt.NDArray[np.integer], vocab_size: int) -> None:
    """Raises DataError at the first id outside [0, vocab_size) among the tokens, which begin at ``start``."""
    if not tokens.size or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    values = tokens.astype(np.int64)
    first = int(np.argmax((values < 0) | (values >= vocab_size)))
    raise DataError(
        f"{prefix}.bin: token {start + first} has id {values[first]}, outside the vocabulary of {vocab_size} "
        f"(ids 0 to {vocab_size - 1}); tokenize with the model's tokenizer or raise vocab_size"
    )


def check_contents(
    prefixes: Sequence[str],
    vocab_size: int,
    *,
    eod_id: int | None = None,
    max_tokens: int = _CHECKED_TOKENS,
    max_entries: int = _CHECKED_ENTRIES,
    max_lengths: int = _CHECKED_LENGTHS,
) -> None:
    """Looks into the pairs: at up to about ``max_tokens`` tokens, ``max_entries`` sequences and documents, and
    ``max_lengths`` lengths of sequences, of more at none but those.

    Meant to be called by each rank with its share of the files before training. An id outside [0, vocab_size) is a
    crash on some devices and silent noise on others; plain samples need no entry of an index, packed ones do, and a
    damaged index tells of a damaged corpus. What fits the budgets is read whole. Of more only pieces are, spread over
    every file, so that a run over trillions of tokens starts at once; a file made with another tokenizer shows in any
    piece of it, and ``InstanceSet.read`` looks at every token that is trained on.

    With ``eod_id`` the last token of each file must be that one, or its documents' ends could not be seen. Raises
    DataError naming file and field.
    """
    if not prefixes:
        return
    files = TokenFiles(prefixes)
    itemsizes = [DTYPES[code].itemsize for code in files.codes]
    check_indices([f"{prefix}.idx" for prefix in files.prefixes], itemsizes, max_entries, max_lengths)
    budgets = shares(files.tokens.tolist(), max_tokens, 4096)
    for file, prefix in enumerate(files.prefixes):
        dtype = DTYPES[files.codes[file]]
        if (
            eod_id is not None
            and files.tokens[file]
            and (last := files.read(file, int(files.tokens[file]) - 1, 1)[0]) != eod_id
        ):
            raise DataError(
                f"{prefix}.bin: ends with token {last}, not with {eod_id}, the tokenizer's end of a document; tokenize "
                "it with --append-eod and this tokenizer, or leave out the options that go by documents"
            )
        if dtype.kind == "u" and vocab_size > np.iinfo(dtype).max:
            continue
        for start, count in spread_pieces(int(files.tokens[file]), budgets[file], _CHECK_CHUNK):
            _check_ids(prefix, start, files.read(file, start, count), vocab_size)
    files.close()
