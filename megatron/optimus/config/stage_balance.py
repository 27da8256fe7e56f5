"""Splits consecutive layers over pipeline stages so that the slowest rank is as fast as possible: pure arithmetic.

``ranks`` lists the stages of each rank. Layers of equal cost are assigned one by one to the rank with the least work,
which is optimal. Where costs differ, that split is improved by moving single layers to a neighbouring stage, then by a
search for a split in which every rank costs less than the slowest one does now. The search is exhaustive, but ends
after MAX_VISITED_STAGES stages, more than it needs with one chunk per rank or few stages, and keeps the best split so
far. The result must depend on the arguments alone: every rank and the planner compute it independently.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

MAX_VISITED_STAGES = 20_000  # about 0.1 s

StagesOfRanks = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)  # a search for layouts asks for the same again and again
def balance_layers(
    costs: tuple[int, ...], ranks: StagesOfRanks, head_cost: int, fixed: tuple[int | None, int | None]
) -> tuple[int, ...]:
    """Returns the number of layers of every stage. Prefers the equal split where no other has a faster slowest rank.

    Args:
        costs: cost of each layer.
        ranks: stages of each rank.
        head_cost: cost of what the last stage does besides its layers.
        fixed: layers of the first and of the last stage, where given; the other stages then begin with as many each.
    """
    num_layers, num_stages = len(costs), sum(map(len, ranks))
    given = {stage: size for stage, size in zip((0, num_stages - 1), fixed, strict=True) if size is not None}
    balance = _Balance(costs, ranks, head_cost, given)
    rest, others = num_layers - sum(given.values()), num_stages - len(given)
    found = []
    if others == 0 or rest % others == 0:
        found.append([given.get(stage, rest // max(1, others)) for stage in range(num_stages)])
    if not given:
        found.append(_assign_greedily(sum(costs), num_layers, ranks, head_cost))
    best = min(found, key=balance.slowest)  # the first of equals
    return tuple(balance.improved(best) if len(set(costs)) > 1 else best)


def _assign_greedily(total: int, num_layers: int, ranks: StagesOfRanks, head_cost: int) -> list[int]:
    """Assigns layers one by one, each at the mean cost ``total / num_layers``; loads are in units of 1 / num_layers."""
    num_stages = sum(map(len, ranks))
    sizes = [1] * num_stages
    heads = [0] * (num_stages - 1) + [head_cost * num_layers]
    for _ in range(num_layers - num_stages):
        # The next layer goes to the rank with least to do and there to its least stage; among equals to the earliest,
        # which idles least at the end.
        loads = [sum(sizes[stage] * total + heads[stage] for stage in stages) for stages in ranks]
        stages = ranks[loads.index(min(loads))]
        sizes[min(stages, key=lambda stage: sizes[stage] * total + heads[stage])] += 1
    return sizes


class _Balance:
    """Evaluates and improves splits of given layers."""

    def __init__(self, costs: Sequence[int], ranks: StagesOfRanks, head_cost: int, given: Mapping[int, int]) -> None:
        self.sums = [0, *accumulate(costs)]  # of the layers before each
        self.num_layers, self.given = len(costs), given
        self.num_stages = sum(map(len, ranks))
        self.rank_of = {stage: rank for rank, stages in enumerate(ranks) for stage in stages}
        self.last_of = [max(stages) for stages in ranks]
        self.head_cost = head_cost

    def stage_costs(self, sizes: Sequence[int]) -> list[int]:
        ends = list(accumulate(sizes))
        costs = [self.sums[end] - self.sums[end - size] for end, size in zip(ends, sizes, strict=True)]
        costs[-1] += self.head_cost
        return costs

    def loads(self, sizes: Sequence[int]) -> list[int]:
        """Cost of every rank."""
        loads = [0] * len(self.last_of)
        for stage, cost in enumerate(self.stage_costs(sizes)):
            loads[self.rank_of[stage]] += cost
        return loads

    def slowest(self, sizes: Sequence[int]) -> int:
        return max(self.loads(sizes))

    def improved(self, sizes: list[int]) -> list[int]:
        """Finds a split whose slowest rank is faster; ``sizes`` if there is none."""
        best = sizes
        found: list[int] | None = sizes
        while found is not None:
            best = self._local_search(found)
            self._visits_left, self._infeasible = MAX_VISITED_STAGES, set[tuple[int, ...]]()
            limit = self.slowest(best) - 1
            found = self._search(0, 0, (limit,) * len(self.last_of))
        return best if self.slowest(best) < self.slowest(sizes) else sizes

    def _local_search(self, sizes: list[int]) -> list[int]:
        """Moves single layers over boundaries while the slowest ranks, or among equals the slowest stages, do less."""

        def slowness(sizes: list[int]) -> tuple[list[int], list[int]]:
            return sorted(self.loads(sizes), reverse=True), sorted(self.stage_costs(sizes), reverse=True)

        best, has_moved = slowness(sizes), True
        while has_moved:
            has_moved = False
            for left in range(self.num_stages - 1):
                for giver, taker in ((left, left + 1), (left + 1, left)):
                    if sizes[giver] == 1 or giver in self.given or taker in self.given:
                        continue
                    moved = list(sizes)
                    moved[giver] -= 1
                    moved[taker] += 1
                    if (now := slowness(moved)) < best:
                        sizes, best, has_moved = moved, now, True
        return sizes

    def _search(self, stage: int, start: int, spare: tuple[int, ...]) -> list[int] | None:
        """Searches sizes of ``stage`` and those behind it for the layers from ``start`` on.

        No rank may cost more than it has to ``spare``. None if there are no such sizes, or none was found in the visits
        that are left.
        """
        if stage == self.num_stages:
            return []
        later = [space for space, last in zip(spare, self.last_of, strict=True) if last >= stage]
        state = (stage, start, *later)
        cost = self.sums[-1] - self.sums[start] + self.head_cost
        if self._visits_left == 0 or cost > sum(later) or state in self._infeasible:
            return None
        self._visits_left -= 1
        rank = self.rank_of[stage]
        for end in self._ends(stage, start, spare[rank]):
            used = self.sums[end] - self.sums[start]
            left = (*spare[:rank], spare[rank] - used, *spare[rank + 1 :])
            if (sizes := self._search(stage + 1, end, left)) is not None:
                return [end - start, *sizes]
        self._infeasible.add(state)
        return None

    def _ends(self, stage: int, start: int, spare: int) -> list[int]:
        """Lists where the stage may end, the most promising first."""
        behind = self.num_stages - 1 - stage
        spare -= self.head_cost if not behind else 0
        most = min(bisect_right(self.sums, self.sums[start] + spare) - 1, self.num_layers - behind)
        least = self.num_layers if not behind else start + 1
        if stage in self.given:
            least, most = max(least, start + self.given[stage]), min(most, start + self.given[stage])
        if self.last_of[self.rank_of[stage]] == stage:  # what the rank leaves over, nobody else can use
            return list(range(most, least - 1, -1))
        share = self.sums[start] + (self.sums[-1] - self.sums[start]) / (behind + 1)
        return sorted(range(least, most + 1), key=lambda end: abs(self.sums[end] - share))
