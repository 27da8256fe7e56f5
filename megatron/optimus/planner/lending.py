"""ZeRO stage 2: the buffers that buckets borrow for gradients, by playing backwards through without tensors.

What deepspeed_ext/zero/{gradients,ring}.py do, bucket by bucket: a bucket borrows a buffer when the first of its
gradients is moved there, is sent when all are there and all before it have been sent, and gives the buffer back when
somebody needs one and IN_FLIGHT are on their way. Buffers that were made stay. In the first backward of a chunk nothing
is moved before its end: until then all gradients wait where the backward has left them. A test holds this against the
real thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.optimus.config.schema import PipelineSchedule
from megatron.optimus.planner.parameters import (
    ALIGNMENT,
    Family,
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

IN_FLIGHT = 4  # deepspeed_ext/zero/ring.py
ENOUGH = 3  # steps and, without a pipeline, micro-batches, after which no further buffers are made
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


def lending(share: Share) -> Lending:
    """Of one rank."""
    by_key = families_by_key(share)
    if share.config.optimizer.zero_stage != 2 or all(family.group_size == 1 for family in by_key.values()):
        return Lending()
    split = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)
    splits = share.layout.pp > 1 and share.config.parallel.pipeline_schedule in split
    waits_always = splits or not share.config.optimizer.overlap_grad_reduce
    play = Backwards(share, by_key, waits_always=waits_always)
    order = chunks_in_order(share, splits=splits, most=ENOUGH if len(share.stages) == 1 else 2 * share.layout.pp)
    for _ in range(ENOUGH):
        for chunk in order:
            play.backward(chunk)
        play.step()
    return Lending(play.made * play.buffer_bytes, play.first_end, waits_always)


def waiting_bytes(share: Share, parameters: Iterable[Parameter]) -> int:
    """Of gradients that wait for the end of the backward; those of experts may be added where they are kept."""
    adds = adds_expert_gradients(share)
    return sum(one.numel * share.element for one in parameters if not (one.is_expert and adds))


def chunks_in_order(share: Share, *, splits: bool, most: int) -> list[int]:
    """Whose backward comes when, of ``most`` micro-batches of a step."""
    chunks, pp, count = len(share.stages), share.layout.pp, min(most, share.micro_batches)
    if splits or chunks == 1:
        return list(reversed(range(chunks))) * count
    actions = rank_order(share.pipeline_rank, pp, chunks, count)
    return [stage // pp for is_backward, stage, _ in actions if is_backward]


@dataclass(eq=False)
class _Bucket:
    has_peers: bool
    slots: set[int] = field(default_factory=set)  # parameters that lie here, by place in the model
    arrived: set[int] = field(default_factory=set)  # in this backward
    is_known: bool = False
    is_open: bool = False  # has storage
    is_reduced: bool = False
    is_launched: bool = False


class Backwards:
    """Backwards through a rank's chunks, one after the other."""

    def __init__(self, share: Share, families: dict[tuple[bool, ...], Family], *, waits_always: bool) -> None:
        self._share, self._waits_always = share, waits_always
        self.names: list[tuple[int | None, str]] = []  # (layer or None, name) of parameters, in the model's order
        self._parameters: list[Parameter] = []
        self._arrivals: list[list[int]] = []  # of each chunk
        self._number()
        self._where: list[list[_Bucket]] = [[] for _ in self._parameters]
        self.buckets = self._buckets(families)
        reduced = [family for family in families.values() if family.group_size > 1]
        self.buffer_bytes = max(min(one.bucket, one.numel) for one in reduced) * gradient_bytes(share)[1]
        self.made = self.first_end = 0
        # Gradients that are added where they are kept are not expected before the first step is over, except those of
        # parameters in several buckets, which are counted one by one.
        fused = [place for place, one in enumerate(self._parameters) if one.is_expert and adds_expert_gradients(share)]
        self._surprises = {place for place in fused if len(self._where[place]) == 1}
        self._has_settled = False
        self.is_armed = False  # the present backward sends what is complete
        self._free, self._sent = 0, list[_Bucket]()

    @property
    def lent(self) -> int:
        """Buffers that buckets have, on their way or not."""
        return self.made - self._free

    def _number(self) -> None:
        """Places of parameters in the model, and in which order the gradients of each chunk come."""
        share, ends = self._share, end_parameters(self._share)
        layers = {
            number: layer_parameters(share, is_moe=is_moe)
            for chunk, kinds in zip(share.chunks, share.kinds, strict=True)
            for number, is_moe in zip(chunk, kinds, strict=True)
        }
        self.names += [(None, name) for name in ends if name == "embedding"]
        self.names += [(number, name) for number in sorted(layers) for name in layers[number]]
        self.names += [(None, name) for name in ends if name != "embedding"]
        self._parameters += [ends[name] if number is None else layers[number][name] for number, name in self.names]
        at = {name: place for place, name in enumerate(self.names)}
        for stage, chunk in zip(share.stages, share.chunks, strict=True):
            names: list[tuple[int | None, str]] = []
            if stage == share.num_stages - 1:
                names += [(None, "head"), *([] if share.has_embedding else [(None, "embedding")]), (None, "final_norm")]
            names += [(number, name) for number in reversed(chunk) for name in ARRIVALS]
            names += [(None, "embedding")] if stage == 0 else []
            self._arrivals.append([at[key] for key in names if key in at])

    def _buckets(self, families: dict[tuple[bool, ...], Family]) -> list[_Bucket]:
        """In the order in which they are launched."""
        made = {key: [_Bucket(one.group_size > 1) for _ in range(one.num_buckets)] for key, one in families.items()}
        ends = dict.fromkeys(families, 0)
        for slot in reversed(range(len(self._parameters))):
            key = family_key(self._share, self._parameters[slot])
            size, start = families[key].bucket, ends[key]
            ends[key] = start + round_up(self._parameters[slot].numel, ALIGNMENT)
            for bucket in made[key][start // size : (start + self._parameters[slot].numel - 1) // size + 1]:
                bucket.slots.add(slot)
                self._where[slot].append(bucket)
        return sorted((one for own in made.values() for one in own), key=lambda one: -min(one.slots, default=0))

    # ---- a backward

    def backward(self, chunk: int) -> None:
        """Of one micro-batch through a chunk, with what is sent at its end."""
        slots = self._arrivals[chunk]
        reached = {bucket for slot in slots for bucket in self._where[slot]}
        several = len(self._arrivals) > 1
        self._now = [bucket for bucket in self.buckets if bucket in reached or not several]
        self._next = 0
        self.is_armed = not self._waits_always and all(bucket.is_known for bucket in self._now)
        for bucket in self.buckets:
            bucket.arrived.clear()
            bucket.is_launched = False
        for slot in slots if self.is_armed else ():
            self._arrive(slot)
        waiting = set() if self.is_armed else set(slots)
        for bucket in self._now:
            self._take_left(bucket, waiting)
            if not bucket.is_launched:
                self._launch(bucket)
            bucket.is_known = True

    def step(self) -> None:
        self._has_settled = True
        while self._sent:
            self._give_back()

    def _arrive(self, slot: int) -> None:
        """A gradient of a parameter in several buckets is moved at once, others when all of their bucket are there."""
        if len(self._where[slot]) > 1:
            for bucket in self._where[slot]:
                self._open(bucket)
        for bucket in self._where[slot]:
            bucket.arrived.add(slot)
            if self._is_complete(bucket):
                self._open(bucket)
                while self._next < len(self._now) and self._is_complete(self._now[self._next]):
                    self._launch(self._now[self._next])

    def _is_complete(self, bucket: _Bucket) -> bool:
        return bucket.arrived == bucket.slots and (self._has_settled or not bucket.slots & self._surprises)

    def _take_left(self, bucket: _Bucket, waiting: set[int]) -> None:
        """Moves the gradients of a bucket that wait, alone in it or not."""
        here = bucket.slots & waiting
        alone = {slot for slot in here if len(self._where[slot]) == 1}
        for slots in (alone, *({slot} for slot in sorted(here - alone, reverse=True))):
            for one in {other: None for slot in slots for other in self._where[slot]}:
                self._open(one)
            left = waiting_bytes(self._share, (self._parameters[slot] for slot in waiting))
            self.first_end = max(self.first_end, left + self.made * self.buffer_bytes)
            waiting -= slots

    def _open(self, bucket: _Bucket) -> None:
        if not bucket.has_peers:
            return
        if bucket.is_open:
            if bucket.is_reduced and not bucket.is_launched:
                self._keep(bucket)
        else:
            self._lend(bucket)

    def _keep(self, bucket: _Bucket) -> None:
        """One that is on its way is wanted again: it keeps its buffer."""
        self._sent.remove(bucket)
        bucket.is_reduced = False

    def _lend(self, bucket: _Bucket) -> None:
        while not self._free and len(self._sent) >= IN_FLIGHT:
            self._give_back()
        if self._free:
            self._free -= 1
        else:
            self.made += 1
        bucket.is_open = True

    def _launch(self, bucket: _Bucket) -> None:
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
