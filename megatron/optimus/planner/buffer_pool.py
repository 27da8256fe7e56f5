"""Replays ZeRO stage 2's buffer pool: how many buffers buckets acquire for gradients, backward by backward.

What deepspeed_ext/zero does with its pool, without tensors: a bucket acquires a buffer when the first of its gradients
is moved there, is sent when all are there and all before it have been sent, and releases the buffer when somebody
needs one and IN_FLIGHT are on their way. Buffers that were made stay. In the first backward of a chunk nothing is
moved before its end: until then all gradients wait where the backward has left them. A test holds this against the
real optimizer, event by event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from megatron.optimus.config.rank_plan import RankPlan
from megatron.optimus.models.parameters import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    RankParameter,
    embedding_and_head_parameters,
    gradient_order,
    parameters_of_layer,
)
from megatron.optimus.planner.optimizer_state import (
    ALIGNMENT,
    BufferKey,
    PlannedFlatBuffer,
    buffer_key,
    flat_buffers_by_key,
    round_up,
)
from megatron.optimus.planner.pipeline import rank_order

IN_FLIGHT = 4  # buckets on their way before the next one waits for the oldest


@dataclass(frozen=True)
class PoolBytes:
    """Bytes of the buffer pool of a rank."""

    buffers: int = 0  # they stay once they are made
    first_end: int = 0  # most bytes of buffers and of gradients that wait, when a first backward has ended
    waits_always: bool = False  # every backward is like the first


@dataclass(frozen=True)
class GradientSchedule:
    """What decides how a rank's gradients come and where they go; the key of ``replay``'s cache."""

    parameters: tuple[RankParameter, ...]  # in the model's order
    waiting: tuple[int, ...]  # bytes of the gradient of each before it is moved
    arrivals: tuple[tuple[int, ...], ...]  # places of parameters, in the order of their gradients, of each chunk
    buffers: tuple[tuple[BufferKey, PlannedFlatBuffer], ...]
    keys: tuple[BufferKey, ...]  # of the parameters
    sent_width: int  # bytes of an element that travels
    waits_always: bool
    names: tuple[tuple[int | None, str], ...] = field(compare=False)  # layer, if in one, and name in it


def buffer_pool(rank: RankPlan) -> PoolBytes:
    """Counts the pool's bytes on one rank; none where nothing is sharded."""
    if rank.config.optimizer.zero_stage != 2 or all(one.group_size == 1 for one in flat_buffers_by_key(rank).values()):
        return PoolBytes()
    enough = 2 if len(rank.stages) == 1 else 2 * rank.layout.pp  # micro-batches; a test tries more
    return replay(gradients_of(rank), tuple(chunks_in_order(rank, enough)))


def gradients_of(rank: RankPlan) -> GradientSchedule:
    """Says how a rank's gradients come, from the declared order of a layer's, and where they go."""
    ends, by_key = embedding_and_head_parameters(rank), flat_buffers_by_key(rank)
    own = {is_moe: parameters_of_layer(rank, is_moe=is_moe) for kinds in rank.moe_flags for is_moe in set(kinds)}
    kind_of = {
        number: is_moe
        for chunk, kinds in zip(rank.chunks, rank.moe_flags, strict=True)
        for number, is_moe in zip(chunk, kinds, strict=True)
    }
    layers = {number: own[is_moe] for number, is_moe in kind_of.items()}
    orders = {is_moe: gradient_order(rank.model, is_moe=is_moe) for is_moe in own}
    names: list[tuple[int | None, str]] = [(None, name) for name in ends if name == EMBEDDING]
    names += [(number, name) for number in sorted(layers) for name in layers[number]]
    names += [(None, name) for name in ends if name != EMBEDDING]
    parameters = tuple(ends[name] if number is None else layers[number][name] for number, name in names)
    at = {name: place for place, name in enumerate(names)}
    arrivals = []
    for stage, chunk in zip(rank.stages, rank.chunks, strict=True):
        come: list[tuple[int | None, str]] = []
        if stage == rank.num_stages - 1:
            come += [(None, HEAD), *([] if rank.has_embedding else [(None, EMBEDDING)]), (None, FINAL_NORM)]
        come += [(number, name) for number in reversed(chunk) for name in orders[kind_of[number]]]
        come += [(None, EMBEDDING)] if stage == 0 else []
        arrivals.append(tuple(at[key] for key in come if key in at))
    return GradientSchedule(
        parameters,
        tuple(waiting_bytes(rank, [one]) for one in parameters),
        tuple(arrivals),
        tuple(by_key.items()),
        tuple(buffer_key(rank, one) for one in parameters),
        rank.sent_gradient_element_bytes,
        rank.splits_backward or not rank.config.optimizer.overlap_grad_reduce,
        tuple(names),
    )


def waiting_bytes(rank: RankPlan, parameters: Iterable[RankParameter]) -> int:
    """Bytes of gradients that wait for the end of the backward; those of experts may be added where they are kept."""
    adds = rank.adds_expert_gradients
    return sum(one.numel * rank.element_bytes for one in parameters if not (one.is_expert and adds))


def chunks_in_order(rank: RankPlan, most: int) -> list[int]:
    """Lists the chunks in the order of their backwards, of at most ``most`` micro-batches of a step."""
    chunks, pp, count = len(rank.stages), rank.layout.pp, min(most, rank.micro_batches)
    if chunks == 1 or rank.splits_backward:
        return list(reversed(range(chunks))) * count
    actions = rank_order(rank.pipeline_rank, pp, chunks, count)
    return [stage // pp for is_backward, stage, _ in actions if is_backward]


@lru_cache(maxsize=1024)  # a search for layouts asks for the same again and again
def replay(gradients: GradientSchedule, order: tuple[int, ...]) -> PoolBytes:
    """Replays steps of these chunks' backwards until no step makes further buffers."""
    backwards, before = BackwardReplay(gradients), -1
    while backwards.made > before:  # from the second step on, a step that makes none is followed by others like it
        before = backwards.made if backwards.has_settled else -1
        for chunk in order:
            backwards.backward(chunk)
        backwards.step()
    return PoolBytes(backwards.made * backwards.buffer_bytes, backwards.first_end, gradients.waits_always)


@dataclass(eq=False)
class BucketReplay:
    """One bucket: which parameters lie in it, and how far it is."""

    has_peers: bool
    slots: list[int] = field(default_factory=list)  # places of parameters, the last ones first
    missing: int = 0  # gradients that have not come in this backward
    is_known: bool = False
    is_open: bool = False  # has storage
    is_reduced: bool = False
    is_launched: bool = False


class BackwardReplay:
    """Replays backwards through a rank's chunks, one after the other."""

    def __init__(self, gradients: GradientSchedule) -> None:
        self.gradients = gradients
        self._where: list[list[BucketReplay]] = [[] for _ in gradients.parameters]
        self.buckets = self._buckets()
        sharded = [one for _, one in gradients.buffers if one.group_size > 1]
        self.buffer_bytes = max(min(one.bucket, one.numel) for one in sharded) * gradients.sent_width
        self.made = self.first_end = 0
        self.has_settled = False  # the first step is over
        self.is_armed = False  # the present backward sends what is complete
        self._free, self._sent = 0, list[BucketReplay]()

    def _buckets(self) -> list[BucketReplay]:
        """Makes the buckets of all flat buffers, in the order in which they are launched."""
        buffers, parameters = dict(self.gradients.buffers), self.gradients.parameters
        made = {key: [BucketReplay(one.group_size > 1) for _ in range(one.num_buckets)] for key, one in buffers.items()}
        ends = dict.fromkeys(buffers, 0)
        for slot in reversed(range(len(parameters))):
            key, numel = self.gradients.keys[slot], parameters[slot].numel
            size, start = buffers[key].bucket, ends[key]
            ends[key] = start + round_up(numel, ALIGNMENT)
            self._where[slot] = made[key][start // size : (start + numel - 1) // size + 1]
            for bucket in self._where[slot]:
                bucket.slots.append(slot)
        return sorted((one for own in made.values() for one in own), key=lambda one: -min(one.slots, default=0))

    # ---- a backward

    def backward(self, chunk: int) -> None:
        """Replays one micro-batch's backward through a chunk, with what is sent at its end."""
        slots = self.gradients.arrivals[chunk]
        self._now = self.buckets
        if len(self.gradients.arrivals) > 1:
            reached = {bucket for slot in slots for bucket in self._where[slot]}
            self._now = [bucket for bucket in self.buckets if bucket in reached]
        self._next = 0
        self.is_armed = not self.gradients.waits_always and all(bucket.is_known for bucket in self._now)
        for bucket in self.buckets:
            bucket.missing, bucket.is_launched = len(bucket.slots), False
        if self.is_armed:
            for slot in slots:
                self._arrive(slot)
        self._end(set() if self.is_armed else set(slots))

    def step(self) -> None:
        """Ends a step: buffers whose gradients are still sent come back."""
        self.has_settled = True
        while self._sent:
            self._release()

    def _arrive(self, slot: int) -> None:
        """A gradient of a parameter in several buckets is moved at once, others when all of their bucket are there."""
        where = self._where[slot]
        if len(where) > 1:
            for bucket in where:
                self._open(bucket)
        for bucket in where:
            bucket.missing -= 1
            if not bucket.missing:
                self._open(bucket)
                while self._next < len(self._now) and not self._now[self._next].missing:
                    self._launch(self._now[self._next])

    def _end(self, waiting: set[int]) -> None:
        """Moves the gradients that wait, bucket by bucket, and sends what is left."""
        left = sum(self.gradients.waiting[slot] for slot in waiting)
        for bucket in self._now:
            here = [slot for slot in bucket.slots if slot in waiting] if waiting else []
            alone = [slot for slot in here if len(self._where[slot]) == 1]
            for slots in (alone, *([slot] for slot in here if len(self._where[slot]) > 1)):
                for one in {other: None for slot in slots for other in self._where[slot]}:
                    self._open(one)
                if slots:
                    self.first_end = max(self.first_end, left + self.made * self.buffer_bytes)
                    left -= sum(self.gradients.waiting[slot] for slot in slots)
                    waiting.difference_update(slots)
            if not bucket.is_launched:
                self._launch(bucket)
            bucket.is_known = True

    def _open(self, bucket: BucketReplay) -> None:
        if not bucket.has_peers:
            return
        if bucket.is_open:
            if bucket.is_reduced and not bucket.is_launched:
                self._keep(bucket)
        else:
            self._acquire(bucket)

    def _keep(self, bucket: BucketReplay) -> None:
        """One that is on its way is wanted again: it keeps its buffer."""
        self._sent.remove(bucket)
        bucket.is_reduced = False

    def _acquire(self, bucket: BucketReplay) -> None:
        while not self._free and len(self._sent) >= IN_FLIGHT:
            self._release()
        if self._free:
            self._free -= 1
        else:
            self.made += 1
        bucket.is_open = True

    def _launch(self, bucket: BucketReplay) -> None:
        self._open(bucket)
        self._next += 1
        bucket.is_launched = True
        if bucket.has_peers:
            bucket.is_reduced = True
            self._sent.append(bucket)

    def _release(self) -> None:
        bucket = self._sent.pop(0)
        bucket.is_open = bucket.is_reduced = False
        self._free += 1
