"""Which corpus the sample at position n comes from, and how many samples of that corpus came before: computed.

With weights w_i that add up to 1, corpus i has c_i(n) of the first n samples, and for every n and i

    |c_i(n) - n w_i| < 1

so no corpus is ever a whole sample ahead or behind. This is the chairman assignment problem (Tijdeman 1980), in
scheduling the Pfair schedule of one processor (Baruah, Cohen, Plaxton, Varvel 1996): the k-th sample of corpus i (from
0) must be drawn at one of the positions

    floor(k / w_i) <= position < ceil((k + 1) / w_i)

and drawing, at each position, the released sample whose deadline comes first (EDF) finds such an order, as the weights
add up to 1. EDF alone must start at 0 to know position n. To jump into the middle, positions are cut into blocks of
B >= 2 / min(w) + 2, and a block is worked out alone, from a state that follows from n directly:

- c_i(n) is floor(n w_i) or one more. Write *early* for the corpora that have the one more; how many are early is known
  (the counts add up to n). If any choice of them can be continued within the bounds, then the choice of those with the
  earliest deadlines can: the samples that must be drawn before t number sum_i max(0, floor(t w_i) - c_i(n)), and this
  choice makes the sum smallest for all t at once.
- Run EDF from that state at the block before: after B positions it is in a state that lies on a correct order (it can
  be continued, as it came from EDF) and can be reached from the block's start: no window is longer than B, so what must
  have been drawn in the positions before is bounded by those of the block run through. Such states, at the bounds of
  all blocks, are the fixed points of the order. The counts do not fall from one to the next, as B w_i >= 2.
- Between two fixed points EDF runs again, over just the samples that lie between them. By Hall's theorem it succeeds:
  windows inside the block, at its start and at its end are each covered by one of the arguments above.

Memory is O(B) and does not depend on the number of samples; a block costs about a microsecond a position, once.
Weights are multiples of 2^-40, exact integers in all arithmetic: the order is the same on every machine.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.optimus.config.schema import ConfigError

logger = logging.getLogger("optimus")

UNIT = 1 << 40
_MIN_BLOCK = 1 << 12
_MAX_BLOCK = 1 << 21  # positions worked out at once: a few seconds, once a block


class _Jobs(NamedTuple):
    """Samples to draw within a block, as positions relative to its start, in the order of their release."""

    releases: list[int]
    keys: list[int]  # deadline * corpora + corpus: the heap's order


class BlendSchedule:
    """The order of corpora for one set of weights.

    Args:
        weights: one number >= 0 per corpus, not all 0; only their ratios matter

    Raises ConfigError for impossible weights, or one below about a millionth of their sum.
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
        """Weights that add up to one."""
        return [a / UNIT for a in self.numerators]

    def at(self, start: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """For positions [start, start + count): the corpus, and the samples of that corpus at earlier positions.

        int32 [count] and int64 [count].
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
        """Samples of each corpus among the first ``position``."""
        number, inside = divmod(position, self.block_length)
        state = self._state(number)
        if not inside:
            return list(state)
        drawn = np.bincount(self._load(number)[0][:inside], minlength=len(state))
        return [a + int(b) for a, b in zip(state, drawn, strict=True)]

    def _load(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(corpus, samples of it before) of each position of a block; the last block asked for is kept."""
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
        """Counts at the start of a block: a fixed point."""
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
        """EDF over one block from ``state``, to ``end_state`` if given: int32 [block_length], corpora."""
        releases, keys = self._jobs(start, state, end_state)
        number, next_job = len(keys), 0
        order = [0] * self.block_length
        heap: list[int] = []
        push, pop, corpora = heapq.heappush, heapq.heappop, len(state)
        for position in range(self.block_length):
            while next_job < number and releases[next_job] <= position:
                push(heap, keys[next_job])
                next_job += 1
            deadline, order[position] = divmod(pop(heap), corpora)
            assert deadline > position  # the theorem above
        return np.array(order, dtype=np.int32)

    def _jobs(self, start: int, state: list[int], end_state: list[int] | None) -> _Jobs:
        length, corpora = self.block_length, len(state)
        releases, keys = [], []
        for i, a in enumerate(self.numerators):
            if not a:
                continue
            if end_state is None:  # all that are released before the end
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
        return _Jobs(all_releases[order].tolist(), all_keys[order].tolist())


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
