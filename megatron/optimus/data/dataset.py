"""Training instances: fixed-length windows over token files, and the samples with labels that are made of them.

An *instance* is Megatron's sample of a dataset: L = ``seq_length`` tokens of one file, known by its number. Each file's
documents are read as one stream of tokens, as they lie in the .bin file. A split owns a range of that stream, and
within it instance j is the L tokens [first + j*L, first + (j + 1)*L). Each token is the label of the one before, so the
last position has no label. An instance whose length is a multiple of a page is then read from disk without extra bytes.
With the extra token (Megatron's way) the token after the instance is read too, as the last label. The set of instances
is the same with and without it, because up to L tokens at the end of a range stay unused so that each instance is
followed by a token of its range. A run may therefore switch at any step without moving a sample.

The ranges of training, validation and test do not touch. By position they are shares of the *tokens* of each file; by
hash they are ranges of whole documents, which preprocessing has laid together (splits.py). Hence

- no token of a validation or test instance, the extra one included, occurs in a training instance;
- a run that changes its sequence length keeps its splits.

Instances span neither files nor splits, but they do span documents.

Packing puts whole documents together so that few of them are cut. Plain instances cut a stream of documents every L
tokens, nearly every time inside one. Packed ones are made from windows of ``WINDOW - 1`` times L tokens of a file,
whose documents are laid into ``WINDOW`` sequences by best fit: the longest first, each into the fullest sequence that
still has room for it (Ding et al. 2024, arXiv 2404.10830). Documents are cut only if they are longer than L, lie at an
end of a window, or, rarely, fit into no sequence; the pieces then fill the remaining holes. One sequence in ``WINDOW``
is padding, 1.6 % of all positions. The number of sequences of a file depends on its size alone, so the order of samples
does not depend on the packing. The packing of a window is computed when one of its samples is read, which takes a
fraction of a millisecond and a few pages of the index. The documents of a sample lie apart in a window of half a
million tokens, so a packed sample takes several reads.

Shapes: S positions of a sample, T tokens.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError, SplitBy, parse_split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.index_reader import DTYPES, check_indices, share_by_size, spread_ranges
from megatron.optimus.data.indexed import check_token_ids
from megatron.optimus.data.splits import NO_HASH_SPLITS, hash_range, splits_path
from megatron.optimus.layers import NO_LABEL
from megatron.optimus.platform.log import counted

WINDOW = 64  # sequences packed together; more would cut hardly fewer documents

_CHECK_CHUNK = 1 << 20  # tokens looked at together
_CHECKED_TOKENS = 1 << 26  # tokens a rank looks at before the run: a fraction of a second
_CHECKED_ENTRIES = 1 << 23  # entries of indices likewise, of 20 bytes each: a share of 1/256 of 2 T tokens is whole
_CHECKED_LENGTHS = 1 << 26  # of 4 bytes each, less than a tenth of a second

Ids = npt.NDArray[np.int64]
TokenRange = tuple[int, int]  # tokens [start, stop) of a file
_PackedWindow = tuple[list[list[TokenRange]], set[int]]  # packed sequences, and the tokens at which documents begin


class Split(IntEnum):
    """Index of a split among the shares that the option ``split`` names, in Megatron's order."""

    TRAIN = 0
    VALID = 1
    TEST = 2


def split_range(num_tokens: int, split: str, part: Split) -> TokenRange:
    """Returns the tokens [start, stop) that a split owns of a file.

    Args:
        num_tokens: tokens of the file
        split: shares of training, validation and test, as ``parse_split`` takes them
        part: which of the three
    """
    before, after = _split_bounds(split, part)
    return _share(num_tokens, before), _share(num_tokens, after)


def range_of_split(files: TokenFiles, number: int, split: str, part: Split, split_by: SplitBy) -> TokenRange:
    """Returns the tokens [start, stop) that a split owns of one of several files.

    Args:
        files: made for the same ``split``
        number: of the file
        split: shares of training, validation and test
        part: which of the three
        split_by: HASH or POSITION

    Raises:
        DataError: the file is not prepared for splits by hash.
    """
    splits, tokens = files.splits[number], int(files.tokens[number])
    if split_by is not SplitBy.HASH:
        return split_range(tokens, split, part)
    if splits == NO_HASH_SPLITS:
        raise DataError(
            f"{splits_path(files.prefixes[number])}: no such file, which a split by hash needs; preprocess the corpus "
            "with --split-by hash, put the file back beside the pair, or use --split-by position"
        )
    return hash_range(splits, tokens, part)


def _split_bounds(split: str, part: Split) -> tuple[Fraction, Fraction]:
    shares = parse_split(split)
    return sum(shares[:part], Fraction(0)), sum(shares[: part + 1], Fraction(0))


def _share(num_tokens: int, share: Fraction) -> int:
    return num_tokens * share.numerator // share.denominator


class TokenSpan(NamedTuple):
    """Consecutive tokens of a corpus."""

    tokens: Ids  # [T]
    following: int  # the token after them; NO_LABEL where it is not to be predicted


class InstanceSet:
    """The instances of one split over one or several .bin/.idx pairs, numbered file after file.

    Args:
        prefixes: paths of the pairs, without suffix
        seq_length: L, tokens per instance
        split: shares of training, validation and test, as ``parse_split`` takes them
        part: which of the three this set holds
        split_by: HASH or POSITION
        files: where to read the pairs, if other sets share the open files; made for the same ``split``
        vocab_size: when given, reading refuses ids outside [0, vocab_size)
        packing: whether instances are made of whole documents
        extra_token: whether the token after an instance is read too, as the label of its last position

    Attributes:
        num_tokens: tokens of all splits together
        labels_per_sample: positions with a label in each sample; None if samples differ (packing)

    Raises:
        DataError: a pair cannot be used, or the split holds no instance.
        ConfigError: the options are impossible.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        seq_length: int,
        *,
        split: str = "1,0,0",
        part: Split = Split.TRAIN,
        split_by: SplitBy = SplitBy.POSITION,
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
        before, after = _split_bounds(split, part)
        if before == after:
            raise ConfigError(f"split={split!r} gives the {part.name.lower()} split no share")
        self.seq_length = seq_length
        self.packing = packing
        self.labels_per_sample = None if packing else seq_length - (not extra_token)
        self._extra = int(extra_token)
        self._vocab_size = vocab_size
        self._files = TokenFiles(prefixes, split=split) if files is None else files
        self._file_numbers = np.array([self._files.number[prefix] for prefix in prefixes], dtype=np.int64)
        tokens = self._files.tokens[self._file_numbers].tolist()
        self.num_tokens = sum(tokens)
        numbers = self._file_numbers.tolist()
        ranges = [range_of_split(self._files, number, split, part, split_by) for number in numbers]
        self._starts = [start for start, _ in ranges]  # first token of the split in each file
        self._plain_counts = [max(0, stop - start - 1) // seq_length for start, stop in ranges]  # of each file
        counts = [num_packed_sequences(n) for n in self._plain_counts] if packing else self._plain_counts
        self._ends = list(itertools.accumulate(counts))  # instances up to and including each file
        self._last_window: tuple[tuple[int, int], _PackedWindow] | None = None  # for reading in order
        by_hash = " by hash" if split_by is SplitBy.HASH else ""
        if not self._ends[-1]:
            raise DataError(
                f"{', '.join(prefixes[:4])}{' ...' if len(prefixes) > 4 else ''}: too little data: the "
                f"{part.name.lower()} split ({split}{by_hash}) of {self.num_tokens} tokens in "
                f"{counted(len(prefixes), 'file')} (the largest has {max(tokens)}) holds no instance of seq_length+1="
                f"{seq_length + 1} tokens; add data, shorten seq_length, or give that split a larger share"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, i: int) -> tuple[str, list[TokenRange]]:
        """Returns the file, and the ranges of its tokens, that instance ``i`` is made of.

        Takes O(log files); with packing the index of the file is read.

        Returns:
            (prefix of the pair, ranges of tokens)
        """
        file, inside = self._file_of(i)
        return self._files.prefixes[self._file_numbers[file]], self._ranges(file, inside)[0]

    def read(self, i: int) -> list[TokenSpan]:
        """Reads the tokens of instance ``i``.

        Returns:
            One span of ``seq_length`` tokens; with packing, spans of that many tokens at most in all. A span that ends
            with its document, or is read without the extra token, has no following token.

        Raises:
            DataError: the file has changed since the start, or an id lies outside the vocabulary.
        """
        file, inside = self._file_of(i)
        ranges, ends = self._ranges(file, inside)
        number, spans = int(self._file_numbers[file]), []
        for (start, stop), ends_document in zip(ranges, ends, strict=True):
            extra = 0 if ends_document else self._extra
            tokens = self._files.read(number, start, stop - start + extra)
            if self._vocab_size is not None:
                check_token_ids(f"{self._files.prefixes[number]}.bin", start, tokens, self._vocab_size)
            tokens = tokens.astype(np.int64)
            spans.append(TokenSpan(tokens[:-1], int(tokens[-1])) if extra else TokenSpan(tokens, NO_LABEL))
        return spans

    def _file_of(self, i: int) -> tuple[int, int]:
        """(position of the file in this set, instance within the file)"""
        if not 0 <= i < len(self):
            raise IndexError(f"instance {i} of {len(self)}")
        file = bisect.bisect_right(self._ends, i)
        return file, i - (self._ends[file - 1] if file else 0)

    def _ranges(self, file: int, inside: int) -> tuple[list[TokenRange], list[bool]]:
        """Token ranges of an instance of a file, and whether a document ends with each (packed) or it may go on."""
        if not self.packing:
            start = self._starts[file] + inside * self.seq_length
            return [(start, start + self.seq_length)], [False]
        window = find_packing_window(inside, self._plain_counts[file])
        cached = self._last_window
        if cached is None or cached[0] != (file, window.first):
            cached = self._last_window = (file, window.first), self._pack(file, window)
        packed, document_starts = cached[1]
        ranges = packed[window.number]
        return ranges, [stop in document_starts for _, stop in ranges]

    def _pack(self, file: int, window: PackingWindow) -> _PackedWindow:
        start = self._starts[file] + window.first * self.seq_length
        stop = start + window.instances * self.seq_length
        found = self._files.document_starts(int(self._file_numbers[file]), start, stop + 1).tolist()
        return pack_documents(sorted({start, stop, *found}), window.sequences, self.seq_length), set(found)


class PackingWindow(NamedTuple):
    """The window of a file that a packed sequence is made from."""

    first: int  # plain instance at which the window begins
    instances: int  # plain instances that the window is as long as
    sequences: int  # packed sequences made from it
    number: int  # of the packed sequence within the window


def num_packed_sequences(instances: int) -> int:
    """Returns how many packed sequences the tokens of ``instances`` plain instances of a file become.

    A last, shorter window has no spare sequence.
    """
    windows, rest = divmod(instances, WINDOW - 1)
    return windows * WINDOW + rest


def find_packing_window(packed: int, instances: int) -> PackingWindow:
    """Finds the window of packed sequence number ``packed`` of a file that has ``instances`` plain instances."""
    window, number = divmod(packed, WINDOW)
    first = window * (WINDOW - 1)
    rest = instances - first
    if rest >= WINDOW - 1:
        return PackingWindow(first, WINDOW - 1, WINDOW, number)
    return PackingWindow(first, rest, rest, number)


def pack_documents(bounds: Sequence[int], sequences: int, length: int) -> list[list[TokenRange]]:
    """Packs documents into sequences by best fit, the longest first; documents beyond ``length`` tokens are cut.

    Args:
        bounds: ascending, the first token of each document, and the end of the last one: at most ``sequences`` *
            ``length`` tokens
        sequences: number of sequences
        length: tokens of a sequence

    Returns:
        The ranges of tokens of each sequence, ascending.
    """
    uncut: list[tuple[int, int]] = []  # (tokens, first token) of what is to be kept whole
    for start, stop in itertools.pairwise(bounds):
        whole = (stop - start) // length
        uncut += [(length, start + i * length) for i in range(whole)]
        if start + whole * length < stop:
            uncut.append((stop - start - whole * length, start + whole * length))
    uncut.sort(key=lambda document: (-document[0], document[1]))
    free = [length * sequences + i for i in range(sequences)]  # room * sequences + sequence, ascending
    packed: list[list[TokenRange]] = [[] for _ in range(sequences)]

    def put(index: int, size: int, start: int) -> None:
        """Puts tokens into the sequence of ``free[index]``."""
        room, sequence = divmod(free.pop(index), sequences)
        packed[sequence].append((start, start + size))
        if room > size:
            bisect.insort(free, (room - size) * sequences + sequence)

    unplaced = []
    for size, start in uncut:
        index = bisect.bisect_left(free, size * sequences)
        if index < len(free):
            put(index, size, start)
        else:
            unplaced.append((size, start))
    for size, start in unplaced:  # into the largest holes, cut
        while size:
            fitting = min(size, free[-1] // sequences)
            put(len(free) - 1, fitting, start)
            size, start = size - fitting, start + fitting  # noqa: PLW2901
    return [sorted(ranges) for ranges in packed]


class LabelledSample(NamedTuple):
    """Tokens and labels of one row of a batch."""

    tokens_S: Ids
    labels_S: Ids  # the token to predict at each position, or NO_LABEL
    starts: list[int]  # positions above 0 at which a document, or padding, begins


@dataclass(frozen=True)
class SampleOptions:
    """What is made of the documents within a sample: Megatron's options of these names.

    Documents are recognized by the end-of-document token, as in Megatron: the token after it begins the next one. That
    costs a look at tokens that are in memory anyway; the index would cost a search on disk for every sample. So these
    options need a tokenizer, and corpora that were tokenized with --append-eod (``check_contents`` looks at the end of
    each).
    """

    eod_id: int | None = None  # the token that ends a document; the options below need it
    reset_attention_mask: bool = False  # attention inside documents only
    reset_position_ids: bool = False  # positions count from each document's beginning
    eod_mask_loss: bool = False  # after the end of a document nothing is predicted


def make_sample(
    spans: list[TokenSpan],
    length: int,
    options: SampleOptions,
    transform: Callable[[Ids], Ids] | None = None,
) -> LabelledSample:
    """Makes a sample of spans, laid one after the other and padded at the end.

    Args:
        spans: as ``InstanceSet.read`` returns them
        length: S, positions of the sample
        options: what is made of documents
        transform: applied to the tokens of each span (fill in the middle); may make spans longer, and what then lies
            beyond ``length`` is cut off
    """
    if transform is not None:
        spans = [_transformed(span, transform(span.tokens)) for span in spans]
    tokens = np.concatenate([np.empty(0, np.int64), *(span.tokens for span in spans)])
    labels = np.append(tokens[1:], NO_LABEL)[: tokens.size]
    ends = list(itertools.accumulate(span.tokens.size for span in spans))
    labels[[end - 1 for end in ends]] = [span.following for span in spans]
    starts = set(ends)
    if options.eod_id is not None:
        at_end = np.flatnonzero(tokens == options.eod_id)
        starts.update((at_end + 1).tolist())
        if options.eod_mask_loss:
            labels[at_end] = NO_LABEL
    missing = max(0, length - tokens.size)
    tokens = np.append(tokens, np.full(missing, options.eod_id or 0))[:length]
    labels = np.append(labels, np.full(missing, NO_LABEL))[:length]
    return LabelledSample(tokens, labels, sorted(start for start in starts if start < length))


def _transformed(span: TokenSpan, tokens: Ids) -> TokenSpan:
    """A token that followed the span no longer does if the transform has reordered its last document."""
    return span if np.array_equal(tokens, span.tokens) else TokenSpan(tokens, NO_LABEL)


def positions_in_documents(starts: list[int], length: int) -> Ids:
    """Returns the position of each token in its document: int64 [length].

    Args:
        starts: positions above 0 at which documents begin
        length: positions of the sample
    """
    first = np.zeros(length, dtype=np.int64)
    first[starts] = starts
    return np.arange(length) - np.maximum.accumulate(first)


def check_contents(
    prefixes: Sequence[str],
    vocab_size: int,
    *,
    eod_id: int | None = None,
    max_tokens: int = _CHECKED_TOKENS,
    max_entries: int = _CHECKED_ENTRIES,
    max_lengths: int = _CHECKED_LENGTHS,
) -> None:
    """Checks token ids and index entries of pairs. Each rank calls it with its share of the files before training.

    An id outside [0, vocab_size) is a crash on some devices and silent noise on others; plain samples need no entry of
    an index, packed ones do, and a damaged index is a sign of a damaged corpus. What fits the budgets is read whole. Of
    more, ranges spread over every file are read, so that a run over trillions of tokens starts at once; a file made
    with another tokenizer shows in any range of it, and ``InstanceSet.read`` looks at every token that is trained on.

    Args:
        prefixes: paths of the pairs, without suffix
        vocab_size: entries of the vocabulary
        eod_id: if given, each file must end with this token, as documents' ends could not be seen otherwise
        max_tokens: tokens to read, about
        max_entries: sequences and documents whose index entries to read, about
        max_lengths: sequences whose lengths to read; of more, only those within ``max_entries`` are read

    Raises:
        DataError: names file and field.
    """
    if not prefixes:
        return
    files = TokenFiles(prefixes)
    check_indices([f"{prefix}.idx" for prefix in files.prefixes], max_entries, max_lengths)
    budgets = share_by_size(files.tokens.tolist(), max_tokens, 4096)
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
        for start, count in spread_ranges(int(files.tokens[file]), budgets[file], _CHECK_CHUNK):
            check_token_ids(f"{prefix}.bin", start, files.read(file, start, count), vocab_size)
    files.close()
