"""Simulates a pipeline schedule whose stages take different times.

The orders are those of torch's 1F1B and interleaved 1F1B; a test holds them against torch's own. Messages take no time
of their own (communication.py counts them as work beside computation).
"""

from __future__ import annotations

from collections.abc import Sequence

ENOUGH = 32  # micro-batches, and four a rank, after which each further one takes the busiest rank's time for it
FORWARD = 1 / 3  # of a stage's time for a micro-batch

Action = tuple[bool, int, int]  # is a backward, stage, micro-batch


def bubble_seconds(times: Sequence[float], pp: int, micro_batches: int) -> float:
    """Predicts how much longer a step takes than the busiest rank works.

    ``times``: seconds of every stage for one micro-batch, forward and backward; stage s lies on rank s mod pp.
    """
    count = min(micro_batches, max(4, ENOUGH // pp) * pp)
    busiest = max(sum(times[rank::pp]) for rank in range(pp))
    orders = [rank_order(rank, pp, len(times) // pp, count) for rank in range(pp)]
    return max(0.0, seconds_of(orders, times) - count * busiest)


def rank_order(rank: int, pp: int, chunks: int, micro_batches: int) -> list[Action]:
    """Lists what a rank computes in its order: forwards to fill the pipeline, then one forward, one backward in turn.

    With several chunks, as many micro-batches as there are ranks go through one before the next one; with one chunk and
    fewer micro-batches than ranks, all forwards come first.
    """
    group_size = micro_batches // max(1, micro_batches // pp) if chunks > 1 else micro_batches
    total = chunks * micro_batches
    num_warmup = (chunks - 1) * group_size + 2 * (pp - 1 - rank) if chunks > 1 else pp - 1 - rank
    num_warmup = total if chunks == 1 and micro_batches < pp else min(num_warmup, total)

    def action(place: int, *, is_backward: bool) -> Action:
        turn, within = divmod(place, group_size)
        chunk = chunks - 1 - turn % chunks if is_backward else turn % chunks
        return is_backward, rank + pp * chunk, turn // chunks * group_size + within

    order = [action(place, is_backward=False) for place in range(num_warmup)]
    for place in range(total):
        if num_warmup + place < total:
            order.append(action(num_warmup + place, is_backward=False))
        order.append(action(place, is_backward=True))
    return order


def seconds_of(orders: Sequence[Sequence[Action]], times: Sequence[float]) -> float:
    """Simulates when the last rank is done: each computes in its order, as soon as what it needs is there."""
    last = len(times) - 1
    done: dict[Action, float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            clock, place = clocks[rank], places[rank]
            while place < len(order):
                action = is_backward, stage, number = order[place]
                needed: Action | None = (is_backward, stage + 1 if is_backward else stage - 1, number)
                if stage == (last if is_backward else 0):
                    needed = (False, stage, number) if is_backward else None
                if needed is not None:
                    if needed not in done:
                        break
                    clock = max(clock, done[needed])
                clock += times[stage] * (1 - FORWARD if is_backward else FORWARD)
                done[action] = clock
                place += 1
            moved |= place > places[rank]
            clocks[rank], places[rank] = clock, place
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise RuntimeError("the simulated schedule deadlocks: every rank waits for another one")
    return max(clocks)
