"""A mixture of corpora as one dataset: what Megatron calls a blended dataset.

For each position of the run, the schedule of the weights (blend.py) gives the corpus of the sample, and the number k of
samples drawn from that corpus before. The sample is number k of the corpus's own order (order.py), which holds every
instance of all its files once, then every instance again in another order. A corpus's order depends on the seed and its
name only, so it stays the same when other corpora come and go, and when weights change.

Weights may change in stages: from a stage's first sample on, a new schedule counts from 0, and each corpus goes on
where it was. So a later stage changes nothing before its first sample.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.data.blend import BlendSchedule
from megatron.optimus.data.dataset import InstanceSet, Split, TokenRange, TokenSpan
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.order import permute_many, sample_at, samples_at
from megatron.optimus.data.sources import MixtureStage, Sources
from megatron.optimus.platform.log import counted

logger = logging.getLogger("optimus")

_FEW_SAMPLES = 8  # up to which the scalar permutation is faster than the vectorised one


class SampleLocation(NamedTuple):
    """Where the tokens of the sample at some position lie."""

    corpus: str
    epoch: int
    instance: int  # within the corpus
    prefix: str
    ranges: list[TokenRange]  # of that file


@dataclass(frozen=True)
class CorpusPlan:
    """What a run of some length reads of a corpus."""

    name: str
    files: int
    tokens: int  # of all splits
    instances: int
    samples: int  # drawn by the end of the run

    @property
    def epochs(self) -> float:
        """How often the run reads the corpus."""
        return self.samples / self.instances


class Mixture:
    """The instances of several corpora, numbered corpus after corpus, and the order in which they are drawn.

    A corpus that is too small to have an instance in the validation or test split is missing there, with a warning.

    Args:
        sources: corpora and weights; a single corpus is fine
        seq_length: as ``InstanceSet`` takes it, and likewise split, part, files
        seed: of the order within each corpus
        options: further ones of ``InstanceSet``: split_by, vocab_size, packing, extra_token

    Attributes:
        names: names of the corpora
        corpora: their instances
        labels_per_sample: positions with a label in each sample; None if samples differ (packing)

    Raises:
        DataError: a corpus cannot be used, or has no instance in the training split.
        ConfigError: the options are impossible.
    """

    def __init__(
        self,
        sources: Sources,
        seq_length: int,
        *,
        split: str,
        part: Split,
        seed: int,
        files: TokenFiles | None = None,
        **options: Any,
    ) -> None:
        self.seq_length = seq_length
        self._files = TokenFiles(sources.prefixes, split=split) if files is None else files
        self.names: list[str] = []
        self.corpora: list[InstanceSet] = []
        kept: list[int] = []
        for number, corpus in enumerate(sources.corpora):
            try:
                instances = InstanceSet(
                    corpus.prefixes, seq_length, split=split, part=part, files=self._files, **options
                )
            except DataError as error:
                if part is Split.TRAIN:
                    raise DataError(f"corpus {corpus.name}: {error}") from error
                logger.warning("corpus %s is not in the %s split: %s", corpus.name, part.name.lower(), error)
                continue
            self.names.append(corpus.name)
            self.corpora.append(instances)
            kept.append(number)
        if not kept:
            raise DataError(f"no corpus has an instance in the {part.name.lower()} split ({split})")
        self.labels_per_sample = self.corpora[0].labels_per_sample
        self._lengths = [len(corpus) for corpus in self.corpora]
        self._ends = list(accumulate(self._lengths))
        # of a corpus named by its path the last component counts, so that moving the data changes no order
        self._seeds = [seed ^ xxhash.xxh3_64_intdigest(Path(name).name.encode()) for name in self.names]
        self._file_counts = [len(sources.corpora[number].prefixes) for number in kept]
        stages = sources.stages if part is Split.TRAIN else sources.stages[:1]
        if part is not Split.TRAIN and stages and not any(stages[0].weights[number] for number in kept):
            raise DataError(
                f"no corpus that the first stage draws from has an instance in the {part.name.lower()} split "
                f"({split}); give that split a larger share"
            )
        self._plan_stages(stages, kept)

    def _plan_stages(self, stages: Sequence[MixtureStage], kept: list[int]) -> None:
        if not stages:  # every corpus its share of all instances
            self._schedules = [BlendSchedule(self._lengths)]
            self._firsts = [0]
        else:
            self._schedules = [BlendSchedule([stage.weights[number] for number in kept]) for stage in stages]
            self._firsts = [stage.first_sample(self.seq_length) for stage in stages]
        if any(later <= earlier for earlier, later in zip(self._firsts, self._firsts[1:], strict=False)):
            raise ConfigError(f"stages must follow each other; they start at samples {self._firsts}")
        self._drawn = [[0] * len(kept)]  # of each corpus, before each stage
        for schedule, first, following in zip(self._schedules, self._firsts, self._firsts[1:], strict=False):
            counts = schedule.counts(following - first)
            self._drawn.append([a + b for a, b in zip(self._drawn[-1], counts, strict=True)])

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, i: int) -> list[TokenSpan]:
        """Reads the tokens of instance ``i``, as ``InstanceSet.read`` does."""
        corpus, inside = self._split(i)
        return self.corpora[corpus].read(inside)

    def locate(self, i: int) -> tuple[str, list[TokenRange]]:
        """Returns the file, and the ranges of its tokens, that instance ``i`` is made of: (prefix, ranges)."""
        corpus, inside = self._split(i)
        return self.corpora[corpus].locate(inside)

    def ids_at(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Finds the instances of the samples at positions [start, start + count): int64 [count]."""
        corpora, drawn = self._draws(start, count)
        ids = np.empty(count, dtype=np.int64)
        for corpus in np.unique(corpora).tolist():
            where = np.flatnonzero(corpora == corpus)
            ids[where] = self._order(corpus, drawn[where]) + self._ends[corpus] - self._lengths[corpus]
        return ids

    def corpora_at(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """Finds the corpora of the samples at positions [start, start + count): int32 [count], indices of ``names``."""
        return self._draws(start, count)[0]

    def sample(self, position: int) -> SampleLocation:
        """Finds the tokens of the sample at a position of the run."""
        corpora, drawn = self._draws(position, 1)
        corpus = int(corpora[0])
        epoch, instance = sample_at(int(drawn[0]), self._lengths[corpus], self._seeds[corpus])
        return SampleLocation(self.names[corpus], epoch, instance, *self.corpora[corpus].locate(instance))

    def counts(self, position: int) -> list[int]:
        """Counts the samples of each corpus among the first ``position`` of the run."""
        stage = bisect.bisect_right(self._firsts, position) - 1
        inside = self._schedules[stage].counts(position - self._firsts[stage])
        return [a + b for a, b in zip(self._drawn[stage], inside, strict=True)]

    @property
    def stage_starts(self) -> list[int]:
        """First sample of each stage."""
        return list(self._firsts)

    def targets(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Computes how many of the first samples the weights of all stages give each corpus: [positions, corpora].

        Args:
            positions: numbers of samples
        """
        total = np.zeros((positions.size, len(self.names)))
        for schedule, first, end in zip(self._schedules, self._firsts, [*self._firsts[1:], None], strict=True):
            inside = np.clip(positions, first, end) - first
            total += inside[:, None] * np.array(schedule.shares())
        return total

    def plan(self, total_samples: int) -> list[CorpusPlan]:
        """Computes what a run of ``total_samples`` reads of each corpus."""
        tokens = [corpus.num_tokens for corpus in self.corpora]
        rows = zip(self.names, self._file_counts, tokens, self._lengths, self.counts(total_samples), strict=True)
        return [CorpusPlan(*row) for row in rows]

    def _split(self, i: int) -> tuple[int, int]:
        """(corpus, instance within it)"""
        if not 0 <= i < len(self):
            raise IndexError(f"instance {i} of {len(self)}")
        corpus = bisect.bisect_right(self._ends, i)
        return corpus, i - (self._ends[corpus - 1] if corpus else 0)

    def _draws(self, start: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(corpus, samples drawn from it before) of each position."""
        if start < 0:
            raise ValueError(f"position={start} must not be negative")
        corpora, drawn = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        stop = start + count
        while start < stop:
            stage = bisect.bisect_right(self._firsts, start) - 1
            end = min(stop, self._firsts[stage + 1]) if stage + 1 < len(self._firsts) else stop
            which, before = self._schedules[stage].at(start - self._firsts[stage], end - start)
            corpora.append(which)
            drawn.append(before + np.array(self._drawn[stage], dtype=np.int64)[which])
            start = end
        return np.concatenate(corpora), np.concatenate(drawn)

    def _order(self, corpus: int, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Instances of the ``drawn``-th samples of a corpus; these are consecutive numbers."""
        length, seed = self._lengths[corpus], self._seeds[corpus]
        if drawn.size > _FEW_SAMPLES:
            return samples_at(int(drawn[0]), drawn.size, length, seed)
        return np.array([sample_at(k, length, seed)[1] for k in drawn.tolist()], dtype=np.int64)


def shuffled_rows(count: int, position: int) -> npt.NDArray[np.int64]:
    """Returns the order in which the samples of a batch are dealt out to ranks: int64 [count], fixed by the position.

    Without it, the schedule spreads the corpora so evenly that with two equal weights and two ranks, each rank would
    see one corpus only. Which samples a step has does not change.

    Args:
        count: samples of the global batch
        position: of its first sample
    """
    return permute_many(np.arange(count), count, position)


def log_plan(plan: Sequence[CorpusPlan], total_samples: int, max_epochs: float | None) -> None:
    """Logs what the run reads of each corpus and enforces the limit of epochs.

    Args:
        plan: as ``Mixture.plan`` returns it
        total_samples: samples of the run
        max_epochs: limit for each corpus; None: none

    Raises:
        DataError: the run reads a corpus more often than ``max_epochs``.
    """
    for corpus in plan:
        logger.info(
            "corpus %s: %s, %.3f G tokens, %.4f %% of the samples, %.3f epochs%s",
            corpus.name,
            counted(corpus.files, "file"),
            corpus.tokens / 1e9,
            100 * corpus.samples / max(1, total_samples),
            corpus.epochs,
            " (repeats)" if corpus.epochs > 1 else "",
        )
        if max_epochs is not None and corpus.epochs > max_epochs:
            raise DataError(
                f"corpus {corpus.name} runs dry: the run draws {corpus.samples} samples of its {corpus.instances} "
                f"instances, {corpus.epochs:.3f} epochs, and max_data_epochs={max_epochs:g}; lower its weight, add "
                "data, train fewer steps, or raise max_data_epochs to repeat it"
            )
