"""The order in which a mixture draws samples from its corpora, computed for any position.

With weights w_i that add up to 1, corpus i has c_i(n) of the first n samples, and for every n and i

    |c_i(n) - n w_i| < 1

so no corpus is ever a whole sample ahead of or behind its share. This is the chairman assignment problem (Tijdeman
1980), and in scheduling the Pfair schedule of one processor (Baruah, Cohen, Plaxton, Varvel 1996): the k-th sample of
corpus i (from 0) must be drawn at one of the positions

    floor(k / w_i) <= position < ceil((k + 1) / w_i)

These are its window, from its release to its deadline. Drawing, at each position, the released sample whose deadline
comes first (earliest deadline first, EDF) finds such an order, as the weights add up to 1.

EDF alone must start at 0 to reach position n. To start anywhere, positions are cut into blocks of B >= 2 / min(w) + 2,
and a block is computed by itself, from the counts c_i at its start, which are computed directly:

- c_i(n) is floor(n w_i) or one more. Call the corpora that have the one more *early*; how many are early is known, as
  the counts add up to n. If any choice of early corpora can be continued within the windows, then the choice of those
  with the earliest deadlines can: the samples that must be drawn before t number sum_i max(0, floor(t w_i) - c_i(n)),
  and this choice makes the sum smallest for all t at once.
- EDF runs from those counts over the block before. The counts it ends with can be continued, as EDF made them. They can
  also be reached from the start of the block before: no window is longer than B, so what must have been drawn earlier
  is limited by that block. These counts, at the boundaries of all blocks, are the fixed points of the order. They do
  not fall from one boundary to the next, as B w_i >= 2.
- Between two fixed points EDF runs again, over only the samples that lie between them. By Hall's theorem it succeeds:
  windows inside the block, at its start and at its end are each covered by one of the arguments above.

Memory is O(B) and does not depend on the number of samples; a block costs about a microsecond a position, once.
Weights are multiples of 2^-40, exact integers in all arithmetic: the order is the same on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError

UNIT = 1 << 40  # weights are multiples of 1 / UNIT
_MIN_BLOCK = 1 << 12
_MAX_BLOCK = 1 << 21  # positions computed at once: a few seconds, once a block


class _PendingSamples(NamedTuple):
    """Samples to draw within a block, in the order of their release: positions relative to the block's start."""

    releases: list[int]
    keys: list[int]  # deadline * number of corpora + corpus: sorts by deadline in the heap


class BlendSchedule:
    """The order in which corpora are drawn for one set of weights. No corpus is ever a whole sample off its share.

    Args:
        weights: one number >= 0 per corpus, not all 0; only their ratios matter

    Raises:
        ConfigError: a weight is impossible, or is below about a millionth of their sum.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        self.numerators = _to_units(weights)
        smallest, corpus = min((a, i) for i, a in enumerate(self.numerators) if weights[i])
        self.block_length = max(_MIN_BLOCK, 1 << (2 * UNIT // max(1, smallest) + 2).bit_length())
        if self.block_length > _MAX_BLOCK:
            share = Fraction(weights[corpus]) / sum(Fraction(weight) for weight in weights)
            raise ConfigError(
                f"weight number {corpus + 1} is {float(share):.2e} of all weights, fewer than one sample in "
                f"{_MAX_BLOCK // 2 - 2}; raise it, or put its files into a larger corpus"
            )
        self._fixed: dict[int, list[int]] = {0: [0] * len(self.numerators)}  # state at the start of blocks
        self._block: tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64]] | None = None

    def shares(self) -> list[float]:
        """Returns the weights scaled so that they add up to 1."""
        return [a / UNIT for a in self.numerators]

    def at(self, start: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Finds the corpus at positions [start, start + count), and the samples drawn from it at earlier positions.

        Returns:
            (corpora, int32 [count]; samples of that corpus before, int64 [count])
        """
        corpora, drawn = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        stop = start + count
        while start < stop:
            number, inside = divmod(start, self.block_length)
            block, before = self._load(number)
            end = min(self.block_length, inside + stop - start)
            corpora.append(block[inside:end])
            drawn.append(before[inside:end])
            start += end - inside
        return np.concatenate(corpora), np.concatenate(drawn)

    def counts(self, position: int) -> list[int]:
        """Counts the samples of each corpus among the first ``position``."""
        number, inside = divmod(position, self.block_length)
        state = self._state(number)
        if not inside:
            return list(state)
        drawn = np.bincount(self._load(number)[0][:inside], minlength=len(state))
        return [a + int(b) for a, b in zip(state, drawn, strict=True)]

    def _load(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(corpus, samples of it before) of each position of a block; the last block asked for is cached."""
        if self._block is None or self._block[0] != number:
            state, following = self._state(number), self._state(number + 1)
            order = self._run(number * self.block_length, state, following)
            self._fixed = {number: state, number + 1: following}
            by_corpus = np.argsort(order, kind="stable")
            sizes = np.bincount(order, minlength=len(state))
            rank = np.arange(order.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            before = np.empty(order.size, dtype=np.int64)
            before[by_corpus] = rank
            self._block = number, order, before + np.array(state, dtype=np.int64)[order]
        return self._block[1], self._block[2]

    def _state(self, number: int) -> list[int]:
        """Samples of each corpus before a block: a fixed point."""
        if number not in self._fixed:
            start = (number - 1) * self.block_length
            state = self._continuable(start)
            drawn = np.bincount(self._run(start, state), minlength=len(state))
            self._fixed[number] = [a + int(b) for a, b in zip(state, drawn, strict=True)]
        return self._fixed[number]

    def _continuable(self, position: int) -> list[int]:
        """floor(n w) of each corpus, one more for those whose next sample has the earliest deadline."""
        counts = [position * a // UNIT for a in self.numerators]
        missing = position - sum(counts)
        behind = [i for i, a in enumerate(self.numerators) if position * a % UNIT]
        behind.sort(key=lambda i: (-(-(counts[i] + 1) * UNIT // self.numerators[i]), i))
        for i in behind[:missing]:
            counts[i] += 1
        return counts

    def _run(self, start: int, state: list[int], end_state: list[int] | None = None) -> npt.NDArray[np.int32]:
        """Draws a block from ``state`` to ``end_state`` if given: int32 [block_length], the corpus of each position."""
        releases, keys = self._pending_samples(start, state, end_state)
        number, released = len(keys), 0
        order = [0] * self.block_length
        heap: list[int] = []
        push, pop, corpora = heapq.heappush, heapq.heappop, len(state)
        for position in range(self.block_length):
            while released < number and releases[released] <= position:
                push(heap, keys[released])
                released += 1
            deadline, order[position] = divmod(pop(heap), corpora)
            assert deadline > position  # guaranteed by the theorem in the file's header
        return np.array(order, dtype=np.int32)

    def _pending_samples(self, start: int, state: list[int], end_state: list[int] | None) -> _PendingSamples:
        length, corpora = self.block_length, len(state)
        releases, keys = [], []
        for i, a in enumerate(self.numerators):
            if not a:
                continue
            if end_state is None:  # all samples that are released before the end
                number = -(-(start + length) * a // UNIT) - state[i]
            else:
                number = end_state[i] - state[i]
            steps = np.arange(number + 1, dtype=np.int64) * UNIT  # < 2^62, as number <= length <= 2^21
            quotient, rest = divmod(state[i] * UNIT, a)
            release = (quotient - start) + (rest + steps[:-1]) // a
            deadline = (quotient - start) - (-(rest + steps[1:]) // a)
            releases.append(np.maximum(release, 0))
            # a deadline past the end means: within this block, when the end state says so
            keys.append((np.minimum(deadline, length) if end_state is not None else deadline) * corpora + i)
        all_releases, all_keys = np.concatenate(releases), np.concatenate(keys)
        order = np.lexsort((all_keys, all_releases))
        return _PendingSamples(all_releases[order].tolist(), all_keys[order].tolist())


def _to_units(weights: Sequence[float | Fraction]) -> list[int]:
    """Integers in the ratios of the weights that add up to UNIT. Raises ConfigError."""
    exact = []
    for number, weight in enumerate(weights, start=1):
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"weight number {number} is {weight}; weights must be finite and not negative")
        exact.append(Fraction(weight))
    total = sum(exact)
    if not total:
        raise ConfigError(f"all {len(exact)} weights are 0; give at least one corpus a weight above 0")
    units = [int(weight * UNIT / total) for weight in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (units[i] - exact[i] * UNIT / total, i))
    for i in by_remainder[: UNIT - sum(units)]:
        units[i] += 1
    return units
