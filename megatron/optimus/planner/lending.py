"""ZeRO stage 2: the buffers that buckets borrow for gradients, by playing backwards through without tensors.

What deepspeed_ext/zero/{gradient_hooks,bucket}.py do, bucket by bucket: a bucket borrows a buffer when the first of its
gradients is moved there, is sent when all are there and all before it have been sent, and gives the buffer back when
somebody needs one and IN_FLIGHT are on their way. Buffers that were made stay. In the first backward of a chunk nothing
is moved before its end: until then all gradients wait where the backward has left them. A test holds this against the
real thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.planner.parameters import (
    ALIGNMENT,
    Family,
    FamilyKey,
    Parameter,
    adds_expert_gradients,
    end_parameters,
    families_by_key,
    family_key,
    gradient_bytes,
    layer_parameters,
    round_up,
)
from megatron.optimus.planner.pipeline import rank_order
from megatron.optimus.planner.share import Share

IN_FLIGHT = 4  # deepspeed_ext/zero/bucket.py: MAX_IN_FLIGHT
# In which order the gradients of a layer come. The experts' come from one node of autograd, in the order of its inputs.
ARRIVALS = (
    *("experts_gate_up", "experts_down", "shared_gate", "down", "up", "gate", "router", "mlp_norm"),
    *("o", "k_norm", "q_norm", "v_bias", "v", "k_bias", "k", "q_bias", "q", "attention_norm"),
)


@dataclass(frozen=True)
class Lending:
    """``lent``: bytes of buffers, which stay once they are made. ``first_end``: most bytes of buffers and of gradients
    that wait, when a first backward has ended. ``waits_always``: every backward is like the first."""

    lent: int = 0
    first_end: int = 0
    waits_always: bool = False


@dataclass(frozen=True)
class Gradients:
    """What decides how a rank's gradients come and where they go."""

    parameters: tuple[Parameter, ...]  # in the model's order
    waiting: tuple[int, ...]  # bytes of the gradient of each before it is moved
    arrivals: tuple[tuple[int, ...], ...]  # places of parameters, in the order of their gradients, of each chunk
    families: tuple[tuple[FamilyKey, Family], ...]
    keys: tuple[FamilyKey, ...]  # of the parameters
    sent_width: int  # bytes of an element that travels
    waits_always: bool
    names: tuple[tuple[int | None, str], ...] = field(compare=False)  # layer, if in one, and name in it


def lending(share: Share) -> Lending:
    """Of one rank."""
    if share.config.optimizer.zero_stage != 2 or all(one.group_size == 1 for one in families_by_key(share).values()):
        return Lending()
    enough = 2 if len(share.stages) == 1 else 2 * share.layout.pp  # micro-batches; a test tries more
    return play(gradients_of(share), tuple(chunks_in_order(share, enough)))


def gradients_of(share: Share) -> Gradients:
    ends, by_key = end_parameters(share), families_by_key(share)
    layers = {
        number: layer_parameters(share, is_moe=is_moe)
        for chunk, kinds in zip(share.chunks, share.kinds, strict=True)
        for number, is_moe in zip(chunk, kinds, strict=True)
    }
    names: list[tuple[int | None, str]] = [(None, name) for name in ends if name == "embedding"]
    names += [(number, name) for number in sorted(layers) for name in layers[number]]
    names += [(None, name) for name in ends if name != "embedding"]
    parameters = tuple(ends[name] if number is None else layers[number][name] for number, name in names)
    at = {name: place for place, name in enumerate(names)}
    arrivals = []
    for stage, chunk in zip(share.stages, share.chunks, strict=True):
        come: list[tuple[int | None, str]] = []
        if stage == share.num_stages - 1:
            come += [(None, "head"), *([] if share.has_embedding else [(None, "embedding")]), (None, "final_norm")]
        come += [(number, name) for number in reversed(chunk) for name in ARRIVALS]
        come += [(None, "embedding")] if stage == 0 else []
        arrivals.append(tuple(at[key] for key in come if key in at))
    return Gradients(
        parameters,
        tuple(waiting_bytes(share, [one]) for one in parameters),
        tuple(arrivals),
        tuple(by_key.items()),
        tuple(family_key(share, one) for one in parameters),
        gradient_bytes(share)[1],
        _splits(share) or not share.config.optimizer.overlap_grad_reduce,
        tuple(names),
    )


def waiting_bytes(share: Share, parameters: Iterable[Parameter]) -> int:
    """Of gradients that wait for the end of the backward; those of experts may be added where they are kept."""
    adds = adds_expert_gradients(share)
    return sum(one.numel * share.element for one in parameters if not (one.is_expert and adds))


def chunks_in_order(share: Share, most: int) -> list[int]:
    """Whose backward comes when, of ``most`` micro-batches of a step."""
    chunks, pp, count = len(share.stages), share.layout.pp, min(most, share.micro_batches)
    if chunks == 1 or _splits(share):
        return list(reversed(range(chunks))) * count
    actions = rank_order(share.pipeline_rank, pp, chunks, count)
    return [stage // pp for is_backward, stage, _ in actions if is_backward]


def _splits(share: Share) -> bool:
    """Whether gradients of weights are computed apart, which tells nobody of their arrival."""
    split = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
    return share.layout.pp > 1 and share.config.parallel.pipeline_schedule in split


@lru_cache(maxsize=1024)  # a search for layouts asks for the same again and again
def play(gradients: Gradients, order: tuple[int, ...]) -> Lending:
    """Steps of these chunks' backwards, until no step makes further buffers."""
    backwards, before = Backwards(gradients), -1
    while backwards.made > before:  # from the second step on, a step that makes none is followed by others like it
        before = backwards.made if backwards.has_settled else -1
        for chunk in order:
            backwards.backward(chunk)
        backwards.step()
    return Lending(backwards.made * backwards.buffer_bytes, backwards.first_end, gradients.waits_always)


@dataclass(eq=False)
class Bucket:
    """One bucket: which parameters lie in it, and how far it is."""

    has_peers: bool
    slots: list[int] = field(default_factory=list)  # places of parameters, the last ones first
    missing: int = 0  # gradients that have not come in this backward
    is_known: bool = False
    is_open: bool = False  # has storage
    is_reduced: bool = False
    is_launched: bool = False


class Backwards:
    """Backwards through a rank's chunks, one after the other."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self._where: list[list[Bucket]] = [[] for _ in gradients.parameters]
        self.buckets = self._buckets()
        reduced = [family for _, family in gradients.families if family.group_size > 1]
        self.buffer_bytes = max(min(one.bucket, one.numel) for one in reduced) * gradients.sent_width
        self.made = self.first_end = 0
        self.has_settled = False  # the first step is over
        self.is_armed = False  # the present backward sends what is complete
        self._free, self._sent = 0, list[Bucket]()

    @property
    def lent(self) -> int:
        """Buffers that buckets have, on their way or not."""
        return self.made - self._free

    def _buckets(self) -> list[Bucket]:
        """In the order in which they are launched."""
        families, parameters = dict(self.gradients.families), self.gradients.parameters
        made = {key: [Bucket(one.group_size > 1) for _ in range(one.num_buckets)] for key, one in families.items()}
        ends = dict.fromkeys(families, 0)
        for slot in reversed(range(len(parameters))):
            key, numel = self.gradients.keys[slot], parameters[slot].numel
            size, start = families[key].bucket, ends[key]
            ends[key] = start + round_up(numel, ALIGNMENT)
            self._where[slot] = made[key][start // size : (start + numel - 1) // size + 1]
            for bucket in self._where[slot]:
                bucket.slots.append(slot)
        return sorted((one for own in made.values() for one in own), key=lambda one: -min(one.slots, default=0))

    # ---- a backward

    def backward(self, chunk: int) -> None:
        """Of one micro-batch through a chunk, with what is sent at its end."""
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
        self.has_settled = True
        while self._sent:
            self._give_back()

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

    def _open(self, bucket: Bucket) -> None:
        if not bucket.has_peers:
            return
        if bucket.is_open:
            if bucket.is_reduced and not bucket.is_launched:
                self._keep(bucket)
        else:
            self._lend(bucket)

    def _keep(self, bucket: Bucket) -> None:
        """One that is on its way is wanted again: it keeps its buffer."""
        self._sent.remove(bucket)
        bucket.is_reduced = False

    def _lend(self, bucket: Bucket) -> None:
        while not self._free and len(self._sent) >= IN_FLIGHT:
            self._give_back()
        if self._free:
            self._free -= 1
        else:
            self.made += 1
        bucket.is_open = True

    def _launch(self, bucket: Bucket) -> None:
        self._open(bucket)
        self._next += 1
        bucket.is_launched = True
        if bucket.has_peers:
            bucket.is_reduced = True
            self._sent.append(bucket)

    def _give_back(self) -> None:
        bucket = self._sent.pop(0)
        bucket.is_open = bucket.is_reduced = False
        self._free += 1
